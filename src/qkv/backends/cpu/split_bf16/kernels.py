"""The kernels of this package, as the passes use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from qkv.backends.cpu.backward.frame import BackwardKey
from qkv.backends.cpu.bf16_tiles.tasks import PLANNED_KEYS
from qkv.backends.cpu.forward.kernel import ForwardKernel
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.replay.reduction import Question, ReplayKey
from qkv.backends.cpu.split_bf16.backward import emit_split_backward
from qkv.backends.cpu.split_bf16.backward_block import split_areas
from qkv.backends.cpu.split_bf16.forward import emit_split_forward, split_scratch_bytes
from qkv.backends.cpu.split_bf16.replay import emit_split_replay
from qkv.backends.cpu.split_bf16.replay import split_scratch_bytes as replay_scratch_bytes
from qkv.problem.spec import Spec


class ReplayKernel(NamedTuple):
    """A kernel that computes scores again."""

    emit: Callable[[ReplayKey], str]
    scratch_bytes: Callable[[Question, Spec, TileShape, int], int]
    """Memory in bytes that one worker needs."""


class BackwardKernel(NamedTuple):
    """A backward kernel."""

    emit: Callable[[BackwardKey], str]
    areas: Callable[[TileShape, int, int, int], dict[str, int]]
    """The areas of a worker's scratch, in bytes, given shape, head_dim, v_head_dim and the blocks
    of queries of one task."""


FORWARD = ForwardKernel(emit_split_forward, split_scratch_bytes, PLANNED_KEYS)
REPLAY = ReplayKernel(emit_split_replay, replay_scratch_bytes)
BACKWARD = BackwardKernel(emit_split_backward, split_areas)
"""The backward kernel also serves bfloat16, which is a sum of one term."""
