"""The host side of the backward pass: its kernels, its tasks, and how many threads share them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.backward.layout import (
    BLOCK_KV,
    TASK,
    BackwardKey,
    TableGradient,
    shared_modules,
)
from qkv.backends.cpu.compiler.compile import EmitFunction, Kernel, Module, Runnable, build
from qkv.backends.cpu.machine.host import Host, host
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.passes.forward import operations_of_a_pair
from qkv.backends.cpu.passes.workers import Workload
from qkv.backends.cpu.plan.block_skipping import block_skipping
from qkv.backends.cpu.plan.kernel_choice import shape_of, wide_shape
from qkv.backends.cpu.plan.kernel_spec import integer_bits, kernel_spec
from qkv.backends.cpu.plan.schedule import Schedule, schedule
from qkv.backends.cpu.plan.table_gradients import (
    SummedTable,
    launches_of,
    ranges_of,
    summed_table,
)
from qkv.backends.cpu.split_bf16 import choice as split_bf16
from qkv.problem.backward import BackwardInputs
from qkv.problem.spec import Problem, Spec
from qkv.problem.stored_rows import plain

_EMIT_BACKWARD = EmitFunction("qkv.backends.cpu.backward.kernel", "emit_backward")
_EMIT_DELTA_CORRECTION = EmitFunction(
    "qkv.backends.cpu.backward.delta_correction", "emit_delta_correction"
)

Array = NDArray[Any]

_TASKS = 64
"""Number of tasks that is enough for many cores."""
_TASK_KEYS, _TASK_KEYS_WITH_TILES = 512, 1024
"""Keys of a task, without and with tiles, that make it cheap to pack or split the queries again for
each task."""
_MOST_PARTIALS = 8
"""The most partial sums of dQ that are held at once."""
_MOST_KEYS_IN_FLOAT64 = 512
"""The most keys with which dP of few queries is added in float64, which takes a third longer."""

_VECTORS, _Q_BLOCKS_PER_TASK = 4, 8
"""Vectors of a block of queries, and blocks that are packed at once, with tiles. That many fit a
cache and make splitting the keys worthwhile. dK and dV are added up in these groups, so that their
number must not depend on how many heads or batch rows there are."""
_LEAST_QUERIES = 13
"""The number of queries from which on products are those of the forward pass. With fewer, it runs
the decode kernel, and the delta correction finds lse anew."""


class BackwardPass:
    """The backward pass of one problem.

    `corrects_delta` says that few queries see any key, so that the delta correction runs first.
    `names` are the tables whose gradients are wanted, `out_dtype` is the type of the output.
    `inputs` tell which pairs have a weight of nearly 0 and are left out. `int_bits` are those of
    the problem's values unless given.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        corrects_delta: bool,
        names: Iterable[str],
        out_dtype: np.dtype[Any],
        inputs: BackwardInputs | None = None,
        int_bits: int | None = None,
    ) -> None:
        spec, here = problem.spec, host()
        self._here = here
        self.shape = (
            here.shape_of(spec.compute_dtype) if corrects_delta else backward_shape(problem, here)
        )
        block_q, q_blocks_per_task = self.shape.block_q, self.shape.q_blocks_per_task
        known = not corrects_delta and inputs is not None
        block_filter = block_skipping(problem, block_q, BLOCK_KV, inputs) if known else None
        self.plan = schedule(
            problem, block_q, q_blocks_per_task=q_blocks_per_task, block_filter=block_filter
        ).ordered()
        ranges = _key_ranges(spec, in_tiles=self.shape.product == "tiles")
        self.splits = len(ranges)
        self.tables = [
            summed_table(problem, name, self.splits, "kv_index") for name in sorted(names)
        ]
        self.tasks, self._launches = _task_rows(spec, self.plan, ranges, self.tables)
        self._key = BackwardKey(
            kernel_spec(spec),
            replace(self.shape, q_blocks_per_task=1),
            int_bits or integer_bits(problem),
            spec.rotation is not None,
            out_dtype.name,
            gradient_dtype(problem).name,
            tuple(TableGradient(table.name, table.wide) for table in self.tables),
            corrects_delta,
            corrects_delta and spec.kv_len <= _MOST_KEYS_IN_FLOAT64,
            inputs is not None and inputs.of_part,
        )
        operations = 2.0 * self.plan.pairs * (3 * spec.head_dim + 2 * spec.v_head_dim)
        others = 2 * operations_of_a_pair(spec) * self.plan.pairs
        self._workload = Workload(len(self.tasks), operations, self.shape.product, others)

    @property
    def splits_float32(self) -> bool:
        """Whether products of float32 are sums of products of their bfloat16 terms."""
        return self.shape.terms > 1 and self._key.spec.dtype == "float32"

    def delta_correction(self) -> Kernel:
        """The kernel of the delta correction."""
        return _kernel(_EMIT_DELTA_CORRECTION, self._key, self._here)

    def kernel(self) -> Kernel:
        tiles = self.shape.product == "tiles"
        emit = split_bf16.backward_kernel().emit if tiles else _EMIT_BACKWARD
        return _kernel(emit, self._key, self._here)

    def workers(self) -> int:
        """Threads that pay, at most as many as may run."""
        return self._workload.workers()

    def launch(self, kernel: Kernel, arguments: Runnable, workers: int) -> None:
        self._workload.run(kernel, arguments, workers, self._launches)


def backward_shape(problem: Problem, here: Host) -> TileShape:
    """The tile of the kernel: products are added up as the forward pass does it.

    In another order the last bit of a score differs, and `exp(s - lse)` with it: by a factor of e
    where scores are near 10^7, by more than all numbers where they are near 10^9.
    """
    spec = problem.spec
    shape = shape_of(spec, here, split=split_bf16.may_split(problem))
    if spec.q_len < _LEAST_QUERIES or shape.product == "elements":
        return wide_shape(spec, here)
    if shape.product == "pairs":
        wide = here.shape_of(spec.compute_dtype)
        vectors = wide.block_q // shape.lanes
        return replace(
            wide, lanes=shape.lanes, vectors=vectors, product="pairs", pairs_by=shape.pairs_by,
            quads=shape.quads,
        )  # fmt: skip
    shape = replace(shape, chunks=0, value_tiles=0)
    return replace(shape, vectors=_VECTORS, q_blocks_per_task=_Q_BLOCKS_PER_TASK)


def gradient_dtype(problem: Problem) -> np.dtype[Any]:
    """The dtype of the gradients that a kernel writes, rounded once after everything is added."""
    spec, operands = problem.spec, problem.operands
    broadcast = any(
        stride == 0 and size > 1
        for array in (operands.query, plain(operands.key), plain(operands.value))
        for stride, size in zip(array.strides[:-3], array.shape[:-3], strict=True)
    )
    if broadcast or spec.rotation is not None:
        return spec.compute_dtype
    return operands.query.dtype


@lru_cache(maxsize=256)
def _kernel(emit: EmitFunction, key: BackwardKey, here: Host) -> Kernel:
    shared: tuple[Module, ...] = ()
    if emit in (_EMIT_BACKWARD, _EMIT_DELTA_CORRECTION):
        shared = shared_modules(key, sums_rows=emit == _EMIT_DELTA_CORRECTION)
    return Kernel(build(emit, (key,), here, shared=shared))


def _key_ranges(spec: Spec, *, in_tiles: bool = False) -> list[tuple[int, int]]:
    """Keys of each task of a kv head; their number depends on the shape alone."""
    least = _TASK_KEYS_WITH_TILES if in_tiles else _TASK_KEYS
    wanted = -(-_TASKS // (spec.batch_size * spec.num_kv_heads))
    number = max(1, min(wanted, spec.kv_len // least, _MOST_PARTIALS))
    size = -(-spec.kv_len // (number * BLOCK_KV)) * BLOCK_KV
    return [(k, min(k + size, spec.kv_len)) for k in range(0, spec.kv_len, size)]


def _task_rows(
    spec: Spec, plan: Schedule, ranges: list[tuple[int, int]], tables: list[SummedTable]
) -> tuple[Array, list[tuple[int, int]]]:
    """Rows of `TASK`, the longest first, and the range of rows of each launch."""
    shape = spec.batch_size, spec.num_kv_heads, len(ranges)
    places = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), axis=1)
    tasks = np.zeros((len(places), len(TASK) + len(tables)), np.int64)
    tasks[:, (0, 1, 4)] = places
    tasks[:, 2:4] = np.array(ranges)[places[:, 2]]
    for column, table in enumerate(tables, start=len(TASK)):
        tasks[:, column] = table.copy_of(places) * math.prod(table.shape) * 8
    launch = launches_of(tables, places, shape)
    order = np.lexsort((-_pairs_of_tasks(spec, plan, ranges).reshape(-1), launch))
    return np.ascontiguousarray(tasks[order]), ranges_of(launch[order])


def _pairs_of_tasks(spec: Spec, plan: Schedule, ranges: list[tuple[int, int]]) -> Array:
    """How many pairs each task has, `(batch, kv heads, ranges)`."""
    starts, stops = plan.runs[:, 0], plan.runs[:, 1]
    first, last = plan.tasks[:, 3], plan.tasks[:, 4]
    pairs = np.empty((len(plan.tasks), len(ranges)), np.int64)
    for n, (start, stop) in enumerate(ranges):
        counts = np.maximum(np.minimum(stops, stop) - np.maximum(starts, start), 0)
        ends = np.concatenate([[0], np.cumsum(counts)])
        pairs[:, n] = ends[last] - ends[first]
    by_block = pairs.reshape(spec.batch_size, spec.num_kv_heads, -1, len(ranges))
    return np.asarray(by_block.sum(axis=2))
