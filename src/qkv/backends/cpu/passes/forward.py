"""The host side of the forward pass: its kernel, its tasks, and how many threads share them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from qkv._threads import get_num_threads
from qkv.backends.cpu.compiler.compile import Kernel, Runnable, build
from qkv.backends.cpu.forward.bf16_dot import BF16_DOT
from qkv.backends.cpu.forward.frame import ForwardKey
from qkv.backends.cpu.forward.kernel import ONLINE_SOFTMAX, ForwardKernel
from qkv.backends.cpu.forward.score_blocks import QUARTERS
from qkv.backends.cpu.machine.host import Host, host
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.plan.block_skipping import block_skipping
from qkv.backends.cpu.plan.kernel_spec import integer_bits, kernel_spec
from qkv.backends.cpu.plan.schedule import Schedule, fine_tile, schedule
from qkv.backends.cpu.split_bf16 import choice as split_bf16
from qkv.backends.cpu.threads import jobs
from qkv.problem.expressions import Op, walk
from qkv.problem.spec import Problem, Spec

_SLICE_SECONDS = 0.1
"""Seconds for which compiled code may keep Ctrl-C waiting."""
OPERATIONS_PER_SECOND = {"elements": 5e10, "pairs": 5e10, "tiles": 1e11}
"""Rough number of operations per second and thread, by what one instruction multiplies."""
OTHERS_PER_SECOND = 5e10
_WORTH_A_THREAD = 4e6
"""Number of operations that make it worthwhile to wake a thread."""
_BRIEF = 1e6
"""Number of operations, about 20 microseconds, for which Python may stay locked."""

_SOFTMAX, _DROPOUT, _NODE = 25.0, 75.0, 5.0
"""Cost of a pair beside its products, as operations: its weight, its dropout, and each operation of
its mods and masks."""


def alone_operations() -> tuple[float, float, float]:
    """The most operations of a pass that is brief, of one for one thread, and of one slice."""
    return _BRIEF, 2 * _WORTH_A_THREAD, _SLICE_SECONDS * OPERATIONS_PER_SECOND["elements"]


class Pass:
    """A kernel with its tasks: how many threads share them, and how they are run."""

    def __init__(
        self,
        kernel: Kernel,
        count: int,
        operations: float,
        product: str = "elements",
        others: float = 0.0,
    ) -> None:
        self.kernel = kernel
        self.count = count
        """Number of tasks."""
        self._operations, self._others = operations, others
        self._rate = OPERATIONS_PER_SECOND[product]

    @property
    def is_brief(self) -> bool:
        """Whether it is over as soon as it has begun: no thread pays, no signal has to wait."""
        return self._operations <= _BRIEF

    @property
    def most_workers(self) -> int:
        """Threads that pay."""
        return min(int(self._operations / _WORTH_A_THREAD), self.count)

    def workers(self, threads: int | None = None) -> int:
        """Threads that pay, at most as many as may run."""
        return max(1, min(self.most_workers, threads or get_num_threads()))

    def launch(self, arguments: Runnable, workers: int) -> None:
        seconds = (self._operations / self._rate + self._others / OTHERS_PER_SECOND) / workers
        slices = max(1, math.ceil(seconds / _SLICE_SECONDS))
        # As many tasks for each: nobody waits for the last one.
        step = workers * -(-self.count // (workers * slices))
        share = seconds * step / max(self.count, 1)
        for start in range(0, self.count, step):
            arguments.allow(start, min(start + step, self.count))
            jobs.run(self.kernel, arguments, workers, share)


class ForwardPass(Pass):
    """The forward pass of one problem."""

    def __init__(self, problem: Problem, *, statistics: bool = False) -> None:
        spec, here = problem.spec, host()
        # Sinks scale the output afterwards: round to the type of storage only then.
        self.out_dtype = spec.compute_dtype if spec.sinks else np.dtype(spec.dtype)
        self.shape = shape_of(spec, here, split=split_bf16.allows(problem))
        key = ForwardKey(
            kernel_spec(spec),
            replace(self.shape, q_blocks_per_task=1),
            integer_bits(problem),
            False,
            spec.rotation is not None,
            self.out_dtype.name,
            statistics,
        )
        self.plan = _plan(problem, self.shape)
        self.scratch_bytes = scratch_of(spec, self.shape)
        operations = 2.0 * (spec.head_dim + spec.v_head_dim) * self.plan.pairs
        count, product = len(self.plan.tasks), self.shape.product
        others = operations_of_a_pair(spec) * self.plan.pairs
        super().__init__(_kernel(key, here), count, operations, product, others)


def operations_of_a_pair(spec: Spec) -> float:
    """Rough cost of a pair beside its products, in operations; it dominates for short rows."""
    nodes = sum(isinstance(n, Op) for root in (spec.score, spec.mask) for n in walk(root))
    return _SOFTMAX + _DROPOUT * spec.dropout + _NODE * nodes


def _plan(problem: Problem, shape: TileShape) -> Schedule:
    """The schedule that the kernel of this shape reads."""
    block_q, tile_kv = shape.block_q, fine_tile(problem, shape.block_q)
    block_kv = _kernel_of(shape).block_kv
    block_filter = block_skipping(problem, block_q, block_kv)
    if shape.product == "elements":
        return schedule(problem, block_q, tile_kv=tile_kv, block_filter=block_filter)
    tile_kv = max(tile_kv, block_kv // QUARTERS)
    return schedule(
        problem,
        block_q,
        q_blocks_per_task=shape.q_blocks_per_task,
        tile_kv=tile_kv,
        block_kv=block_kv,
        block_filter=block_filter,
    )


def shape_of(spec: Spec, here: Host, *, split: bool = True) -> TileShape:
    """The tile of the kernel for this problem."""
    return (split_bf16.shape_for(spec, here) if split else None) or _shape(spec, here)


def _shape(spec: Spec, here: Host) -> TileShape:
    """The tile shape of the other kernels: for bfloat16 products where they are quicker.

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
    return shape


def _kernel_of(shape: TileShape) -> ForwardKernel:
    """The kernel that multiplies as the shape says."""
    if shape.product == "elements":
        return ONLINE_SOFTMAX
    return BF16_DOT if shape.terms == 1 else split_bf16.FORWARD


def scratch_of(spec: Spec, shape: TileShape) -> int:
    """Memory in bytes that one worker of a forward pass needs."""
    return _kernel_of(shape).scratch_bytes(spec, shape)


@lru_cache(maxsize=256)
def _kernel(key: ForwardKey, here: Host) -> Kernel:
    return Kernel(build(_kernel_of(key.shape).emit, (key,), here))
