"""The host side of the forward pass: its kernel, its tasks, and how many threads share them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from qkv.backends.cpu.compiler.compile import Kernel, Runnable, build
from qkv.backends.cpu.forward.layout import (
    ONLINE_SOFTMAX,
    QUARTERS,
    ForwardKernel,
    ForwardKey,
    skips_keys_within_blocks,
)
from qkv.backends.cpu.machine.host import Host, host
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.passes.workers import Workload, is_brief, most_in_a_slice
from qkv.backends.cpu.plan.block_skipping import block_skipping
from qkv.backends.cpu.plan.kernel_choice import shape_of
from qkv.backends.cpu.plan.kernel_spec import integer_bits, kernel_spec
from qkv.backends.cpu.plan.schedule import Schedule, fine_tile, schedule
from qkv.backends.cpu.split_bf16 import choice as split_bf16
from qkv.problem.language.expressions import Op, walk
from qkv.problem.spec import Problem, Spec
from qkv.process.forks import importing
from qkv.process.threads import get_num_threads

_SOFTMAX, _DROPOUT, _NODE = 25.0, 75.0, 5.0
"""Cost of a pair beside its products, as operations: its weight, its dropout, and each operation of
its mods and masks."""


_TOGETHER_BYTES = 80 * 1024
"""Bytes of Q and O of the blocks of queries of one task, if they are more than two. Larger tasks
make threads wait longer for the last one."""
_MANY_QUERIES = 64
"""Blocks of so many queries do not share keys: what is read and copied for each is little."""
_TASKS_OF_A_THREAD = 32
"""Tasks for each thread, so that none waits long for the last one."""


class ForwardPass(Workload):
    """The forward pass of one problem; `int_bits` are those of its values unless given."""

    def __init__(
        self, problem: Problem, *, statistics: bool = False, int_bits: int | None = None
    ) -> None:
        spec, here = problem.spec, host()
        # Sinks scale the output afterwards: round to the type of storage only then.
        self.out_dtype = spec.compute_dtype if spec.sinks else np.dtype(spec.dtype)
        self.shape = forward_shape(spec, here, split=split_bf16.may_split(problem))
        key = ForwardKey(
            kernel_spec(spec),
            replace(self.shape, q_blocks_per_task=1),
            int_bits or integer_bits(problem),
            False,
            spec.rotation is not None,
            self.out_dtype.name,
            statistics,
        )
        self.plan = _kernel_schedule(problem, self.shape)
        operations = 2.0 * (spec.head_dim + spec.v_head_dim) * self.plan.pairs
        others = operations_of_a_pair(spec) * self.plan.pairs
        count, product = len(self.plan.tasks), self.shape.product
        if product == "elements" and count:
            most = most_in_a_slice(count, operations, others)
            together = min(most, self.shape.q_blocks_per_task)
            self.shape = replace(self.shape, q_blocks_per_task=together)
            heads = spec.batch_size * spec.num_heads
            count = heads * -(-count // (heads * together))
        self.scratch_bytes = scratch_of(spec, self.shape)
        super().__init__(count, operations, product, others)
        if product == "elements" and spec.q_len <= self.shape.lanes:
            # Only one vector of each tile is computed.
            self.is_brief = is_brief(operations / self.shape.vectors)
        self.kernel = _kernel(key, here)

    def launch(self, arguments: Runnable, workers: int) -> None:
        self.run(self.kernel, arguments, workers)


def forward_shape(spec: Spec, here: Host, *, split: bool = True) -> TileShape:
    """The tile of the forward kernel, with the most blocks of queries that are one task."""
    shape = shape_of(spec, here, split=split)
    return replace(shape, q_blocks_per_task=_q_blocks_per_task(spec, shape))


def _q_blocks_per_task(spec: Spec, shape: TileShape) -> int:
    """How many neighbouring blocks of queries share keys, at most."""
    if shape.product != "elements" or shape.block_q >= _MANY_QUERIES:
        return shape.q_blocks_per_task
    own = shape.block_q * (spec.head_dim + spec.v_head_dim) * spec.compute_dtype.itemsize
    q_blocks = -(-spec.q_len // shape.block_q)
    together = min(q_blocks, max(2, _TOGETHER_BYTES // max(own, 1)))
    if (threads := get_num_threads()) > 1:
        tasks = spec.batch_size * spec.num_heads * q_blocks
        together = min(together, tasks // (_TASKS_OF_A_THREAD * threads))
    return max(1, together)


def operations_of_a_pair(spec: Spec) -> float:
    """Rough cost of a pair beside its products, in operations; it dominates for short rows."""
    nodes = sum(isinstance(n, Op) for n in walk(spec.score, spec.mask))
    return _SOFTMAX + _DROPOUT * spec.dropout + _NODE * nodes


def _kernel_schedule(problem: Problem, shape: TileShape) -> Schedule:
    """The schedule that the kernel of this shape reads."""
    block_q, tile_kv = shape.block_q, fine_tile(problem, shape.block_q)
    block_kv = _kernel_of(shape).block_kv
    block_filter = block_skipping(problem, block_q, block_kv)
    if shape.product == "elements":
        # Tables with an element for each pair are not read by the kernel to leave keys out.
        whole_blocks = tile_kv < block_kv and skips_keys_within_blocks(problem.spec.mask)
        return schedule(
            problem,
            block_q,
            tile_kv=tile_kv,
            block_kv=block_kv if whole_blocks else None,
            block_filter=block_filter,
            in_quarters=False,
        )
    tile_kv = max(tile_kv, block_kv // QUARTERS)
    return schedule(
        problem,
        block_q,
        q_blocks_per_task=shape.q_blocks_per_task,
        tile_kv=tile_kv,
        block_kv=block_kv,
        block_filter=block_filter,
    )


def _kernel_of(shape: TileShape) -> ForwardKernel:
    """The kernel that multiplies as the shape says."""
    if shape.product == "elements":
        return ONLINE_SOFTMAX
    if shape.terms > 1:
        return split_bf16.forward_kernel()
    with importing():
        if shape.product == "pairs":
            from qkv.backends.cpu.bf16_pairs.layout import BF16_PAIRS as kernel
        else:
            from qkv.backends.cpu.bf16_tiles.layout import BF16_TILES as kernel
    return kernel


def scratch_of(spec: Spec, shape: TileShape) -> int:
    """Memory in bytes that one worker of a forward pass needs."""
    return _kernel_of(shape).scratch_bytes(spec, shape)


@lru_cache(maxsize=256)
def _kernel(key: ForwardKey, here: Host) -> Kernel:
    kernel = _kernel_of(key.shape)
    return Kernel(build(kernel.emit, (key,), here, shared=kernel.shared(key)))
