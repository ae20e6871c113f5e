"""The one way into this package: when operands are split, and the kernels that then run.

The rest of the backend imports this module alone. Without the package, `shape_for` would always be
None, and the other kernels would do everything. Kernels are imported when one is used first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from qkv.backends.cpu.bf16_tiles.tile_shape import tiles_shape
from qkv.backends.cpu.machine.host import Host
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.problem.spec import Problem, Spec
from qkv.process.forks import importing
from qkv.process.threads import get_num_threads

if TYPE_CHECKING:
    from qkv.backends.cpu.forward.layout import ForwardKernel
    from qkv.backends.cpu.split_bf16.layout import BackwardKernel, ReplayKernel

LEAST_SIZES = {"float32": (160, 96), "float16": (32, 48)}
"""The sizes from which on split kernels are quicker, by dtype: the least number of queries and of
keys, and the least head_dim + v_head_dim."""

_TERMS = {"float16": 2, "float32": 3}
"""How many bfloat16 numbers add up to one number of each dtype."""
_SHAPES = {
    "amx": TileShape(
        lanes=16, vectors=2, keys=2, halves=True, product="tiles", q_blocks_per_task=32
    )
}
"""The tile shape for each instruction set that has split kernels."""
_LEAST_BLOCKS = 8
"""Blocks of queries of one task, so that splitting its keys pays, if there are enough."""
_LARGEST_SCALE = 2.0**10
"""The largest absolute scale of scores with which operands are split."""


def forward_kernel() -> ForwardKernel:
    with importing():
        from qkv.backends.cpu.split_bf16.layout import FORWARD
    return FORWARD


def replay_kernel() -> ReplayKernel:
    with importing():
        from qkv.backends.cpu.split_bf16.layout import REPLAY
    return REPLAY


def backward_kernel() -> BackwardKernel:
    """The backward kernel of split operands; it also serves bfloat16, a sum of one term."""
    with importing():
        from qkv.backends.cpu.split_bf16.layout import BACKWARD
    return BACKWARD


def split_shape(here: Host, dtype: str) -> TileShape | None:
    """The tile shape of the split kernels for a dtype, or None if the machine has none for it."""
    shape, terms = _SHAPES.get(here.kernels), _TERMS.get(dtype)
    return None if shape is None or terms is None else replace(here.adapted(shape), terms=terms)


def may_split(problem: Problem) -> bool:
    """Whether operands of this problem may be split.

    Tiles take subnormal numbers for 0; a scale above 2^10 could make them show in the result.
    """
    return abs(problem.operands.scale) <= _LARGEST_SCALE


def shape_for(spec: Spec, here: Host) -> TileShape | None:
    """The tile shape of the split kernels if they are quicker for this problem, else None.

    Splitting keys pays if enough queries read them, and products must outweigh the softmax.
    """
    shape, worth = split_shape(here, spec.dtype), LEAST_SIZES.get(spec.dtype)
    if shape is None or worth is None:
        return None
    least_keys, least_dims = worth
    enough = min(spec.q_len, spec.kv_len) >= least_keys
    wide = spec.head_dim + spec.v_head_dim >= least_dims
    plain = spec.rotation is None or spec.dtype == "float32"
    if not (enough and wide and plain):
        return None
    return tiles_shape(spec, shape, get_num_threads(), _LEAST_BLOCKS)
