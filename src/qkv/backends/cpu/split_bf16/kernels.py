"""The kernels of this package, as the passes use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from qkv.backends.cpu.bf16_tiles.tasks import PLANNED_KEYS
from qkv.backends.cpu.compiler.compile import EmitFunction
from qkv.backends.cpu.forward.layout import ForwardKernel
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.replay.layout import Question
from qkv.backends.cpu.split_bf16.backward_block import split_areas
from qkv.backends.cpu.split_bf16.forward import split_scratch_bytes
from qkv.backends.cpu.split_bf16.replay import split_scratch_bytes as replay_scratch_bytes
from qkv.problem.spec import Spec


class ReplayKernel(NamedTuple):
    """A kernel that computes scores again."""

    emit: EmitFunction
    scratch_bytes: Callable[[Question, Spec, TileShape, int], int]
    """Memory in bytes that one worker needs."""


class BackwardKernel(NamedTuple):
    """A backward kernel."""

    emit: EmitFunction
    areas: Callable[[TileShape, int, int, int], dict[str, int]]
    """The areas of a worker's scratch, in bytes, given shape, head_dim, v_head_dim and the blocks
    of queries of one task."""


FORWARD = ForwardKernel(
    EmitFunction("qkv.backends.cpu.split_bf16.forward", "emit_split_forward"),
    split_scratch_bytes,
    PLANNED_KEYS,
)
REPLAY = ReplayKernel(
    EmitFunction("qkv.backends.cpu.split_bf16.replay", "emit_split_replay"), replay_scratch_bytes
)
BACKWARD = BackwardKernel(
    EmitFunction("qkv.backends.cpu.split_bf16.backward", "emit_split_backward"), split_areas
)
"""The backward kernel also serves bfloat16, which is a sum of one term."""
