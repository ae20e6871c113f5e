"""Calls of the decode kernel: when it runs, its chunks of keys, and its argument block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.arguments import Arguments, page_aligned, rotated
from qkv.backends.cpu.backend import integer_bits, kernel_spec
from qkv.backends.cpu.compile import Kernel, build
from qkv.backends.cpu.decode import (
    BLOCK_KV,
    FIELDS,
    RUN,
    TASK,
    DecodeKey,
    emit_decode,
    page_fields,
    panel_of,
    record_bytes,
    scratch_bytes,
)
from qkv.backends.cpu.forward_pass import Pass
from qkv.backends.cpu.frame import Shape
from qkv.backends.cpu.host import Host, host
from qkv.backends.cpu.schedule import Numbers, as_arrays, cheap_part, numbers_of
from qkv.partial import Partial, RowStatistics
from qkv.problem.bounds import bound
from qkv.problem.expressions import Node, variables
from qkv.problem.intervals import Interval
from qkv.problem.rows import Rows, StoredRows
from qkv.problem.spec import Problem, Spec

Array = NDArray[Any]

CHUNK = 512
"""Keys of one task, as long as that makes at most `_MOST` tasks of a kv head."""
_MOST = 256

_FEW = 0.75
"""Of the lanes of a vector: so many queries, or fewer, leave the others idle in a forward pass."""
FEW_OPERATIONS = 1e6
"""As that of `schedule`; here each product waits for a number from memory."""
_ROWS_OF_A_READ = 8
"""Rows of Q whose products take about as long as reading K and V."""


def streams(spec: Spec, shape: Shape) -> bool:
    """Whether there are so few queries that lanes along head_dim beat lanes along queries."""
    return spec.q_len <= _FEW * shape.lanes


@dataclass(frozen=True, slots=True)
class Chunks:
    """Rows of `TASK` and `RUN` of the decode kernel, and the rows of K that all tasks read."""

    tasks: Array
    runs: Array
    keys: int


def chunks(problem: Problem) -> Chunks:
    """The chunks of every kv head that hold an allowed pair; one without keys if there are none."""
    spec, (mask, unknown) = problem.spec, cheap_part(problem, FEW_OPERATIONS)
    sizes = spec.batch_size, spec.num_kv_heads, spec.group_size, spec.q_len, spec.kv_len
    numbers = numbers_of(mask, problem.operands.tables)
    if numbers is None:
        return _chunks(mask, problem.operands.tables, unknown, *sizes)
    return _of_numbers(mask, numbers, unknown, *sizes)


@lru_cache(maxsize=64)
def _of_numbers(mask: Node, numbers: Numbers, unknown: bool, *sizes: int) -> Chunks:
    """A mask that reads the same numbers has the same chunks."""
    return _chunks(mask, as_arrays(numbers), unknown, *sizes)


def chunk_of(kv_len: int) -> int:
    """Keys of one task."""
    return CHUNK * max(1, -(-kv_len // (CHUNK * _MOST)))


def _chunks(
    mask: Node,
    arrays: Mapping[str, Array],
    unknown: bool,
    batches: int,
    kv_heads: int,
    group_size: int,
    q_len: int,
    kv_len: int,
) -> Chunks:
    """With `unknown` conditions beside the mask, no block is known to be full."""
    depends = variables(mask)
    own_batches = batches if "batch" in depends else 1
    own_heads = kv_heads if "head" in depends else 1
    first = np.arange(0, kv_len, BLOCK_KV, dtype=np.int64)[None]
    places = {
        "q_index": Interval.of(0, q_len - 1),
        "kv_index": Interval(first, np.minimum(first + BLOCK_KV, kv_len) - 1),
    }
    if own_batches > 1:
        number = np.arange(batches, dtype=np.int64)[:, None]
        places["batch"] = Interval(number, number)
    else:
        places["batch"] = Interval.of(0, batches - 1)
    some = np.empty((own_batches, own_heads, first.size), bool)
    every = np.empty_like(some)
    for head in range(own_heads):
        # All query heads of the group at once: where they differ, a block is partial.
        heads = head * group_size, (head + 1 if own_heads > 1 else kv_heads) * group_size - 1
        allowed = bound(mask, {**places, "head": Interval.of(*heads)}, arrays)
        some[:, head], every[:, head] = allowed.high > 0, allowed.low >= 1
    return _tasks(some, every & (not unknown), batches, kv_heads, kv_len)


def _tasks(some: Array, every: Array, batches: int, kv_heads: int, kv_len: int) -> Chunks:
    """Tasks from what is known of each block: whether some of its pairs are allowed, or every."""
    own_batches, own_heads, blocks = some.shape
    length = chunk_of(kv_len) // BLOCK_KV
    if every.all() or (some.all() and not every.any()):
        return _alike_tasks(bool(every.all()), batches, kv_heads, kv_len)
    groups, block = np.nonzero(some.reshape(-1, blocks))
    partial = ~every.reshape(-1, blocks)[groups, block]
    chunk = groups * -(-blocks // length) + block // length

    def starts(*changes: Array) -> Array:
        """Where a new stretch of blocks begins."""
        edge = np.ones(len(block), bool)
        edge[1:] = np.logical_or.reduce([np.diff(x) != 0 for x in changes])
        return np.flatnonzero(edge)

    begin = starts(chunk, block - np.arange(len(block)), partial)
    end = np.append(begin[1:], len(block)) - 1 if len(begin) else begin
    runs = np.empty((len(begin), len(RUN)), np.int64)
    runs[:, 0] = block[begin] * BLOCK_KV
    runs[:, 1] = np.minimum((block[end] + 1) * BLOCK_KV, kv_len)
    runs[:, 2] = partial[begin]
    first_run = np.searchsorted(begin, starts(chunk))
    own = _own_tasks(groups[begin][first_run], first_run, len(runs), own_batches * own_heads)
    keys = int((runs[:, 1] - runs[:, 0]).sum())
    copies = batches * kv_heads // (own_batches * own_heads)
    tasks = _repeated(own, own_batches, own_heads, batches, kv_heads)
    return Chunks(tasks, runs, keys * copies)


def _alike_tasks(full: bool, batches: int, kv_heads: int, kv_len: int) -> Chunks:
    """Tasks where all blocks are of one kind: a run each, the same for every kv head."""
    start = np.arange(0, kv_len, chunk_of(kv_len), dtype=np.int64)
    runs = np.empty((len(start), len(RUN)), np.int64)
    runs[:, 0], runs[:-1, 1], runs[:, 2] = start, start[1:], not full
    runs[-1, 1] = kv_len
    tasks = np.empty((batches, kv_heads, len(start), len(TASK)), np.int64)
    groups = np.arange(batches * kv_heads).reshape(batches, kv_heads, 1)
    run = np.arange(len(start))
    columns: tuple[Array | int, ...] = (
        np.arange(batches)[:, None, None], np.arange(kv_heads)[:, None], run, run + 1,
        groups, groups * len(start), len(start),
    )  # fmt: skip
    for i, column in enumerate(columns):
        tasks[..., i] = column
    return Chunks(tasks.reshape(-1, len(TASK)), runs, kv_len * batches * kv_heads)


def _own_tasks(groups: Array, first_run: Array, runs: int, count: int) -> Array:
    """(group, first_run, last_run), a group without keys having one task without runs."""
    last_run = np.append(first_run[1:], runs) if len(first_run) else first_run
    missing = np.setdiff1d(np.arange(count), groups)
    none = np.zeros_like(missing)
    found = np.concatenate(
        [np.stack([groups, first_run, last_run], 1), np.stack([missing, none, none], 1)]
    )
    return found[np.argsort(found[:, 0], kind="stable")]


def _repeated(own: Array, own_batches: int, own_heads: int, batches: int, kv_heads: int) -> Array:
    """`TASK` rows of every batch row and kv head, of which some share theirs."""
    group = np.arange(batches * kv_heads)
    batch, head = np.divmod(group, kv_heads)
    shared = np.minimum(batch, own_batches - 1) * own_heads + np.minimum(head, own_heads - 1)
    counts = np.bincount(own[:, 0], minlength=own_batches * own_heads)
    begins = np.cumsum(counts) - counts
    records = counts[shared]
    first_record = np.cumsum(records) - records
    which = np.repeat(group, records)
    source = begins[shared][which] + np.arange(len(which)) - first_record[which]
    columns = (
        batch[which], head[which], own[source, 1], own[source, 2],
        which, first_record[which], records[which],
    )  # fmt: skip
    tasks = np.empty((len(which), len(TASK)), np.int64)
    for i, column in enumerate(columns):
        tasks[:, i] = column
    return tasks


class DecodePass(Pass):
    """One pass of few queries over the keys."""

    def __init__(self, problem: Problem, *, statistics: bool = False) -> None:
        spec = problem.spec
        self.shape = host().shape_of(spec.compute_dtype)
        # Sinks scale the output afterwards: round to the type of storage only then.
        self.out_dtype = spec.compute_dtype if spec.sinks else np.dtype(spec.dtype)
        self.plan = chunks(problem)
        key = DecodeKey(
            kernel_spec(spec),
            self.shape,
            integer_bits(problem),
            *_as_read(spec),
            self.out_dtype.name,
            statistics,
        )
        self.scratch_bytes = scratch_bytes(spec, self.shape)
        self.record_bytes = record_bytes(spec, self.shape) * len(self.plan.tasks)
        """Of all tasks."""
        rows = max(spec.group_size * spec.q_len, _ROWS_OF_A_READ)
        operations = 2.0 * (spec.head_dim + spec.v_head_dim) * self.plan.keys * rows
        super().__init__(_kernel(key, host()), len(self.plan.tasks), operations)


def _as_read(spec: Spec) -> tuple[tuple[str, str, str], tuple[bool, bool]]:
    """Types of query, key and value as the kernel reads them, and whether the last two are paged.

    Rotated ones are arrays in the type of computation.
    """
    key, value = spec.key_storage, spec.value_storage
    query_dtype = key_dtype = spec.dtype
    if spec.rotation is not None:
        key, query_dtype = None, spec.compute_dtype.name
        key_dtype = query_dtype
    dtypes = (
        query_dtype,
        key.dtype if key else key_dtype,
        value.dtype if value else spec.dtype,
    )
    return dtypes, (key is not None and key.paged, value is not None and value.paged)


@lru_cache(maxsize=256)
def _kernel(key: DecodeKey, here: Host) -> Kernel:
    return Kernel(build(emit_decode, (key,), here))


def decode_bytes(spec: Spec, shape: Shape, workers: int) -> int:
    """Memory of a pass beyond operands and output: scratch of the workers, and all records."""
    records = spec.batch_size * spec.num_kv_heads * -(-spec.kv_len // chunk_of(spec.kv_len))
    return workers * scratch_bytes(spec, shape) + records * record_bytes(spec, shape)


class DecodeArguments(Arguments):
    """The words of one pass of few queries; without workers, no room for what they would write."""

    def __init__(
        self,
        problem: Problem,
        decode: DecodePass,
        workers: int,
        result: Partial,
        statistics: RowStatistics | None = None,
    ) -> None:
        super().__init__(problem, FIELDS)
        spec, plan = problem.spec, decode.plan
        records = page_aligned(decode.record_bytes if workers else 0)
        fields = {
            **dict.fromkeys(FIELDS, 0),
            **self._common(plan.tasks, decode.scratch_bytes, workers),
            "scale": self._real(problem.operands.scale),
            "runs": self._address(plan.runs),
            "rows": spec.group_size * spec.q_len,
            "panel": panel_of(spec),
            "out": self._address(result.out),
            "lse": self._address(result.lse),
            "records": self._address(records),
            "counters": self._address(np.zeros(spec.batch_size * spec.num_kv_heads, np.int64)),
        }
        if statistics is not None:
            fields["entropy"] = self._address(statistics.entropy)
            fields["max_score"] = self._address(statistics.max_score)
            fields["max_weight"] = self._address(statistics.max_weight)
        query, key = rotated(problem)
        fields |= self._operand("query", query)
        fields |= self._rows("key", key) | self._rows("value", problem.operands.value)
        self._write(fields)

    def _rows(self, name: str, rows: Rows) -> dict[str, int]:
        """Keys or values, and their scales and pages if they have any."""
        if not isinstance(rows, StoredRows):
            return self._operand(name, rows)
        parts = {name: rows.values}
        if rows.scales is not None:
            parts[f"{name}_scales"] = rows.scales[..., None]
        fields: dict[str, int] = {}
        for part, array in parts.items():
            if rows.page_table is None:
                fields |= self._operand(part, array)
                continue
            fields |= self._operand(part, array[0])
            table, slots = self._address(rows.page_table), rows.page_table.shape[-1]
            sizes = array.strides[0], rows.page_size, table, slots
            fields |= zip(page_fields(part), sizes, strict=True)
        return fields
