"""The host side of the replays: what `qkv.inspect` asks of weights that were never kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Progress
from qkv.backends.cpu.compiler.compile import EmitFunction, Kernel, build
from qkv.backends.cpu.machine.host import Host, host
from qkv.backends.cpu.passes.arguments import Arguments, rotated_operands
from qkv.backends.cpu.passes.forward import operations_of_a_pair
from qkv.backends.cpu.passes.workers import Workload
from qkv.backends.cpu.plan.kernel_choice import shape_of, wide_shape
from qkv.backends.cpu.plan.kernel_spec import integer_bits, kernel_spec
from qkv.backends.cpu.plan.schedule import TILE_KV, Schedule, fine_tile, packs_gqa, schedule
from qkv.backends.cpu.replay.layout import FIELDS, RANGE, Question, ReplayKey, scratch_bytes
from qkv.backends.cpu.split_bf16 import choice as split_bf16
from qkv.partial import coarse
from qkv.problem.spec import Problem, Spec
from qkv.problem.stored_rows import plain

_EMIT_REPLAY = EmitFunction("qkv.backends.cpu.replay.kernel", "emit_replay")
_EMIT_WEIGHT_BLOCKS = EmitFunction("qkv.backends.cpu.replay.weight_blocks", "emit_weight_blocks")

Array = NDArray[Any]

MOST_TOP_KEYS = 256
"""The largest k for which the best keys are kept while scores are computed: inserting a key takes
time in proportion to k."""

_RANGE_KEYS = 512
"""Number of keys of one task of `received`, which makes it cheap to pack the queries for each
task."""
_LEAST_RANGE_KEYS = 128
"""Number of keys of one task of `received` if there would be fewer than `_TASKS` tasks."""
_TASKS = 64


def top(
    problem: Problem,
    lse: Array,
    k: int,
    progress: Progress | None = None,
    of_part: bool = False,
) -> tuple[Array, Array] | None:
    """Indices and weights of the k best keys, `(*batch_shape, num_heads, q_len, k)`.

    None where a list of k is too long to keep in order.
    """
    spec = problem.spec
    count = min(k, spec.kv_len)
    if count > MOST_TOP_KEYS or spec.kv_len >= 2**31:
        return None
    shape = (*lse.shape, k)
    indices, weights = np.full(shape, -1, np.int64), np.zeros(shape, spec.compute_dtype)
    if 0 in (*lse.shape, count):
        return indices, weights
    splits_operands = _splits_operands(problem)
    a, b = weight_shift(problem, lse, splits_operands=splits_operands, of_part=of_part)
    replay = ReplayPass(problem, "top", k=count, splits_operands=splits_operands)
    best = np.empty((*lse.shape, count), spec.compute_dtype)
    best_indices = indices if count == k else np.empty(best.shape, np.int64)
    replay.run({"k": count}, {"best": best, "indices": best_indices}, progress)
    with np.errstate(all="ignore"):
        exact = np.exp((best - a[..., None]) - b[..., None])
        weights[..., :count] = np.where(np.isneginf(best), 0, exact)
    indices[..., :count] = best_indices
    return indices, weights


def received(
    problem: Problem, lse: Array, progress: Progress | None = None, of_part: bool = False
) -> Array:
    """The weight that each key takes in all, `(*batch_shape, num_heads, kv_len)`."""
    spec = problem.spec
    total = np.zeros((*lse.shape[:-1], spec.kv_len), spec.compute_dtype)
    if 0 in (*lse.shape, spec.kv_len):
        return total
    padded = padded_shift(spec, *weight_shift(problem, lse, of_part=of_part))
    replay = ReplayPass(problem, "received")
    arrays = {"shift": padded, "received": total, "blocks": replay.plan.tasks}
    replay.run({"padded_rows": padded.shape[1] * padded.shape[3]}, arrays, progress)
    return total


def _splits_operands(problem: Problem) -> bool:
    """Whether the forward pass multiplied bfloat16 terms, so that a replay of rows does so too."""
    return split_bf16.may_split(problem) and shape_of(problem.spec, host()).terms > 1


def weight_shift(
    problem: Problem, lse: Array, *, splits_operands: bool = False, of_part: bool = False
) -> tuple[Array, Array]:
    """a and b with `log w = (s - a) - b`: lse and 0, or the maximum of a row and log of its sum.

    Both are 0 for a row without keys, whose weights stay 0. Every row is summed again if the
    forward pass multiplied bfloat16 and this replay multiplies elements: their scores differ. Rows
    of a part cannot be summed; there b is what rounding took from lse.
    """
    if of_part:
        rounded = np.where(np.isneginf(lse), 0, lse).astype(problem.spec.compute_dtype)
        with np.errstate(invalid="ignore"):
            return rounded, np.where(np.isfinite(lse), lse - rounded, 0).astype(rounded.dtype)
    a = np.where(np.isneginf(lse), 0, lse)
    b = np.zeros_like(a)
    shape = shape_of(problem.spec, host(), split=split_bf16.may_split(problem))
    other_scores = shape.product != "elements" and not splits_operands
    rows = np.isfinite(lse) if other_scores else coarse(a)
    if rows.any():
        row_max, log_sum = _max_and_log_sum(problem, rows, splits_operands)
        a[rows], b[rows] = row_max[rows], log_sum[rows]
    return a, b


def _max_and_log_sum(problem: Problem, rows: Array, splits_operands: bool) -> tuple[Array, Array]:
    """Maximum of some rows, sinks included, and the logarithm of their sum over that."""
    replay = ReplayPass(problem, "sums", rows, splits_operands=splits_operands)
    row_max = np.full(rows.shape, -np.inf, problem.spec.compute_dtype)
    log_sum = np.full_like(row_max, -np.inf)
    replay.run({}, {"row_max": row_max, "log_sum": log_sum})
    sinks = problem.operands.sinks
    if sinks is None:
        return row_max, log_sum
    with np.errstate(all="ignore"):
        sink = sinks.astype(row_max.dtype)[:, None]
        whole = np.maximum(row_max, sink)
        return whole, np.logaddexp(row_max - whole + log_sum, sink - whole)


def padded_shift(spec: Spec, a: Array, b: Array) -> Array:
    """`(heads, vectors, 2, lanes)`: a and b of each vector of rows; b = inf beyond the last."""
    shape, heads = host().shape_of(spec.compute_dtype), spec.batch_size * spec.num_heads
    rows = -(-spec.q_len // shape.block_q) * shape.block_q
    parts = []
    for part, beyond in ((a, 0.0), (b, np.inf)):
        padded = np.full((heads, rows), beyond, a.dtype)
        padded[:, : spec.q_len] = part.reshape(heads, spec.q_len)
        parts.append(padded.reshape(heads, -1, shape.lanes))
    return np.stack(parts, axis=2)


class ReplayPass:
    """One question about one problem: its kernel, its tasks, and how they are run."""

    def __init__(
        self,
        problem: Problem,
        question: Question,
        rows: Array | None = None,
        k: int = 0,
        splits_operands: bool = False,
    ) -> None:
        spec, here = problem.spec, host()
        self.problem = problem
        self.shape = wide_shape(spec, here)
        if splits_operands:
            self.shape = replace(shape_of(spec, here), chunks=0, value_tiles=0)
        by_keys = question in ("received", "blocks")
        can_pack = not by_keys and not splits_operands
        self.pack_gqa = can_pack and packs_gqa(spec, self.shape.lanes)
        key = ReplayKey(
            question,
            replace(kernel_spec(spec), dropout=False),
            replace(self.shape, q_blocks_per_task=1),
            integer_bits(problem),
            self.pack_gqa,
            spec.rotation is not None,
        )
        self.kernel = _kernel(key, here)
        block_q = self.shape.block_q
        coarse_tiles = self.pack_gqa or splits_operands
        tile_kv = TILE_KV if coarse_tiles else fine_tile(problem, block_q)
        self.plan = schedule(problem, block_q, self.pack_gqa, self.shape.q_blocks_per_task, tile_kv)
        self.tasks, keys = self.plan.tasks, 0
        if by_keys:
            self.plan = self.plan.ordered()
        if question == "received":
            self.tasks, keys = _key_ranges(spec, self.plan)
        elif rows is not None:
            self.tasks = self._tasks_of_rows(rows)
        if splits_operands:
            self.scratch_bytes = split_bf16.replay_kernel().scratch_bytes(
                question, spec, self.shape, k
            )
        else:
            self.scratch_bytes = scratch_bytes(question, spec, self.shape, k, keys)

    def _tasks_of_rows(self, rows: Array) -> Array:
        """The tasks of blocks that hold any of these rows."""
        spec, tasks = self.problem.spec, self.plan.tasks
        rows_of_block = spec.q_len * (spec.group_size if self.pack_gqa else 1)
        flat = rows.reshape(spec.batch_size, -1, rows_of_block)
        rows_of_task = self.shape.block_q * self.shape.q_blocks_per_task
        starts = np.arange(0, rows_of_block, rows_of_task)
        wanted = np.logical_or.reduceat(flat, starts, axis=-1)
        heads = tasks[:, 1] // (spec.group_size if self.pack_gqa else 1)
        chosen = wanted[tasks[:, 0], heads, tasks[:, 2] // rows_of_task]
        return np.ascontiguousarray(tasks[chosen])

    def run(
        self,
        numbers: Mapping[str, int],
        arrays: Mapping[str, Array],
        progress: Progress | None = None,
    ) -> None:
        spec, count = self.problem.spec, len(self.tasks)
        share = count / max(len(self.plan.tasks), 1) if self.tasks is not self.plan.tasks else 1.0
        operations = 2.0 * spec.head_dim * self.plan.pairs * min(share, 1.0)
        others = operations_of_a_pair(spec) * self.plan.pairs * min(share, 1.0)
        workload = Workload(count, operations, others=others)
        workers = workload.workers()
        arguments = _ReplayArguments(self, numbers, arrays, workers)
        workload.run(self.kernel, arguments, workers, progress=progress)


class _ReplayArguments(Arguments):
    """The words of one replay."""

    def __init__(
        self,
        replay: ReplayPass,
        numbers: Mapping[str, int],
        arrays: Mapping[str, Array],
        workers: int,
    ) -> None:
        super().__init__(replay.problem, FIELDS)
        spec = replay.problem.spec
        query, key_rows = rotated_operands(replay.problem)
        key = plain(key_rows)
        self._write(
            {
                **dict.fromkeys(FIELDS, 0),
                **self._common_fields(replay.tasks, replay.scratch_bytes, workers),
                **self._operand_fields("query", query),
                **self._operand_fields("key", key),
                "copy_key": int(key.strides[-1] != spec.compute_dtype.itemsize),
                "sign": self._real_bits(1.0),
                "scale": self._real_bits(replay.problem.operands.scale),
                "runs": self._address(replay.plan.runs),
                "rows": spec.q_len * (spec.group_size if replay.pack_gqa else 1),
                "q_blocks_per_task": replay.shape.q_blocks_per_task,
                **numbers,
                **{name: self._address(array) for name, array in arrays.items()},
            }
        )


@lru_cache(maxsize=256)
def _kernel(key: ReplayKey, here: Host) -> Kernel:
    emit = _EMIT_REPLAY if key.shape.terms == 1 else split_bf16.replay_kernel().emit
    if key.question == "blocks":
        emit = _EMIT_WEIGHT_BLOCKS
    return Kernel(build(emit, (key,), here))


def _key_ranges(spec: Spec, plan: Schedule) -> tuple[Array, int]:
    """Rows of `RANGE`, without blocks that see none of its keys, and the most keys of a range."""
    heads = spec.batch_size * spec.num_heads
    size = _RANGE_KEYS if heads * spec.kv_len >= _TASKS * _RANGE_KEYS else _LEAST_RANGE_KEYS
    blocks = plan.tasks.reshape(heads, -1, plan.tasks.shape[1])
    first_run, last_run = blocks[..., 3], blocks[..., 4]
    # A block without runs gets a last key before its first one: no range contains it.
    runs = np.concatenate([plan.runs, [[spec.kv_len, 0, 0]]])
    first_key = np.where(first_run < last_run, runs[first_run, 0], spec.kv_len)
    last_key = np.where(first_run < last_run, runs[last_run - 1, 1], 0)
    parts = []
    for start in range(0, spec.kv_len, size):
        stop = min(start + size, spec.kv_len)
        seen = (first_key < stop) & (last_key > start)
        some = np.flatnonzero(seen.any(axis=1))
        tasks = np.empty((len(some), len(RANGE)), np.int64)
        tasks[:, 0], tasks[:, 1] = np.divmod(some, spec.num_heads)
        tasks[:, 2:4] = start, stop
        first = some * blocks.shape[1]
        tasks[:, 4] = first + seen[some].argmax(axis=1)
        tasks[:, 5] = first + blocks.shape[1] - seen[some, ::-1].argmax(axis=1)
        parts.append(tasks)
    return np.concatenate(parts), size
