"""Which kernel a problem goes to, and its tile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qkv.backends.cpu.bf16_tiles.tile_shape import tiles_shape
from qkv.backends.cpu.machine.host import Host
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.split_bf16 import choice as split_bf16
from qkv.problem.spec import Spec
from qkv.process.threads import get_num_threads

_MOST_QUERIES = 0.75
"""The decode kernel is used up to this many queries for each lane of a vector. The forward kernel
would leave the other lanes idle."""


def is_decode(spec: Spec, shape: TileShape) -> bool:
    """Whether there are so few queries that lanes along head_dim beat lanes along queries."""
    return spec.q_len <= _MOST_QUERIES * shape.lanes


def shape_of(spec: Spec, here: Host, *, split: bool = True) -> TileShape:
    """The tile of the kernel for this problem."""
    if spec.kv_len == 1:
        return wide_shape(spec, here)
    return (split_bf16.shape_for(spec, here) if split else None) or _shape_without_split(spec, here)


def wide_shape(spec: Spec, here: Host) -> TileShape:
    """A tile of elements; a single key takes so few products that they are added in float64.

    Its lse is its score, in which a chain of float32 would be all the error there is.
    """
    shape = here.shape_of(spec.compute_dtype)
    return replace(shape, wide=spec.kv_len == 1 and spec.compute_dtype == np.float32)


def _shape_without_split(spec: Spec, here: Host) -> TileShape:
    """The tile shape of kernels that split nothing: of bfloat16 products where they are quicker.

    Rotated operands come as float32, and few queries do not pay for the transposition of V.
    """
    shape = here.bfloat16_shape
    if (
        shape is None
        or spec.dtype != "bfloat16"
        or spec.rotation is not None
        or 2 * spec.q_len <= shape.lanes
    ):
        return here.shape_of(spec.compute_dtype)
    return tiles_shape(spec, shape, get_num_threads()) if shape.product == "tiles" else shape
