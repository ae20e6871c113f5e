"""The backward pass of the compiled backend: what each task is, its arguments, what is summed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv._threads import get_num_threads
from qkv.backends.cpu import threads
from qkv.backends.cpu.arguments import Arguments, page_aligned, rotated
from qkv.backends.cpu.backend import integer_bits, kernel_spec
from qkv.backends.cpu.backward import emit_backward
from qkv.backends.cpu.backward_block import (
    BLOCK_KV,
    TASK,
    BackwardKey,
    TableGradient,
    fields_with,
    padded,
    scratch_areas,
)
from qkv.backends.cpu.backward_part_block import part_areas
from qkv.backends.cpu.backward_parts import emit_backward_parts
from qkv.backends.cpu.compile import Kernel, build
from qkv.backends.cpu.forward_pass import (
    OPERATIONS_PER_SECOND,
    OTHERS_PER_SECOND,
    multiplies_parts,
    operations_of_a_pair,
    shape_of,
)
from qkv.backends.cpu.frame import Shape
from qkv.backends.cpu.host import Host, host
from qkv.backends.cpu.residual_pass import Rows
from qkv.backends.cpu.residuals import emit_residuals
from qkv.backends.cpu.schedule import Schedule, schedule
from qkv.backends.cpu.summed_tables import SummedTable, summed_table
from qkv.problem.backward import BackwardInputs, OperandGradients, turned_back
from qkv.problem.rows import plain
from qkv.problem.spec import Problem, Spec

Array = NDArray[Any]

_TASKS = 64
"""Tasks that are enough for many cores."""
_KEYS, _KEYS_IN_TILES = 512, 1024
"""Keys that are enough for a task: packing the queries again, and splitting them, is then cheap."""
_PARTS = 8
"""Parts of dQ that may lie beside one another."""
_FEW = 12
"""Queries of a head that see any key, and whose rows are summed again: among more, an error of one
row is seldom the largest."""
_FEW_KEYS = 512
"""Keys up to which dP of few queries are added in float64, which takes a third longer."""

_VECTORS, _TOGETHER = 4, 8
"""Of a block of queries in tiles; blocks that are packed at once: they fit a cache, and pay for
splitting keys."""
_ROWS_PAY = 32
"""Queries from which on tiles are quicker."""
_FAINT, _LIFT = 2.0**-60, 2.0**64
"""Cotangents that all are smaller than the first are multiplied by the second."""


def backward(problem: Problem, inputs: BackwardInputs) -> OperandGradients:
    """Gradients of query, key, value and of the tables that `inputs` names."""
    spec = problem.spec
    if 0 in (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len):
        return _nothing(problem, inputs)
    here = host()
    few = _seeing(inputs.lse) <= _FEW
    shape = here.shape_of(spec.compute_dtype) if few else backward_shape(problem, here)
    if shape.parts > 1 and spec.dtype == "float32" and _is_faint(inputs):
        return _lifted(problem, inputs)
    block_q = shape.block_q
    plan = _in_order(schedule(problem, block_q, together=shape.together))
    ranges = _ranges(spec, in_tiles=shape.product == "tiles")
    tables = [summed_table(problem, name, len(ranges)) for name in sorted(inputs.tables)]
    tasks, launches = _tasks(spec, plan, ranges, tables)
    results = _Results(problem, shape, len(ranges), tables)
    key = BackwardKey(
        kernel_spec(spec),
        replace(shape, together=1),
        integer_bits(problem),
        spec.rotation is not None,
        inputs.out.dtype.name,
        results.dtype.name,
        tuple(TableGradient(table.name, table.wide) for table in tables),
        few,
        few and spec.kv_len <= _FEW_KEYS,
    )
    operations = 2.0 * plan.pairs * (3 * spec.head_dim + 2 * spec.v_head_dim)
    workers = max(1, min(get_num_threads(), len(tasks), int(operations / _WORTH_A_THREAD)))
    others = 2 * operations_of_a_pair(spec) * plan.pairs / OTHERS_PER_SECOND
    seconds = (operations / OPERATIONS_PER_SECOND[shape.product] + others) / workers
    # As many tasks for each: nobody waits for the last one.
    rounds = len(tasks) / workers * _SLICE_SECONDS / max(seconds, _SLICE_SECONDS)
    step = workers * max(1, int(rounds))

    def run(kernel: Kernel) -> None:
        for first, last in launches:
            for start in range(first, last, step):
                arguments.allow(start, min(start + step, last))
                threads.run(kernel, arguments, workers, seconds * step / len(tasks))

    rows = Rows(problem, inputs, len(ranges) if few else 0)
    arguments = _BackwardArguments(problem, inputs, plan, tasks, results, rows, shape, workers)
    if few:
        run(_kernel(emit_residuals, key, here))
        rows.join(problem, inputs)
    emit = emit_backward_parts if shape.product == "tiles" else emit_backward
    run(_kernel(emit, key, here))
    return results.finish()


def sums_again(problem: Problem) -> bool:
    """Whether the backward pass finds lse by itself, in the order in which it adds up scores."""
    return problem.spec.q_len <= _FEW


def _seeing(lse: Array) -> int:
    """Queries with a key, in the head that has most of them."""
    return int(np.count_nonzero(~np.isneginf(lse), axis=-1).max())


def backward_shape(problem: Problem, here: Host) -> Shape:
    """The tile of the kernel: products as the forward pass has them, where they pay."""
    spec = problem.spec
    shape = shape_of(spec, here, in_parts=multiplies_parts(problem))
    if spec.q_len < _ROWS_PAY or shape.product == "elements":
        return here.shape_of(spec.compute_dtype)
    if shape.product == "pairs":
        return replace(here.shape_of(spec.compute_dtype), product="pairs")
    return replace(shape, vectors=_VECTORS, together=min(shape.together, _TOGETHER))


_SLICE_SECONDS = 0.1
_WORTH_A_THREAD = 4e6


@lru_cache(maxsize=256)
def _kernel(emit: Callable[[BackwardKey], str], key: BackwardKey, here: Host) -> Kernel:
    return Kernel(build(emit, (key,), here))


def _is_faint(inputs: BackwardInputs) -> bool:
    """Whether parts of what follows from these cotangents might be subnormal."""
    rows = (inputs.grad_out[..., :1, :], inputs.grad_lse, inputs.grad_out)
    if any((np.abs(of) >= _FAINT).any() for of in rows):
        return False
    return any(of.any() for of in rows)


def _lifted(problem: Problem, inputs: BackwardInputs) -> OperandGradients:
    """Gradients are linear in the cotangents: a power of two goes through them unrounded."""
    up, down = np.float32(_LIFT), np.float32(1 / _LIFT)
    found = backward(
        problem, replace(inputs, grad_out=inputs.grad_out * up, grad_lse=inputs.grad_lse * up)
    )
    return OperandGradients(
        found.query * down,
        found.key * down,
        found.value * down,
        {name: array * array.dtype.type(down) for name, array in found.tables.items()},
    )


def _nothing(problem: Problem, inputs: BackwardInputs) -> OperandGradients:
    spec, operands = problem.spec, problem.operands
    arrays = operands.query, operands.key, operands.value
    query, key, value = (np.zeros(array.shape, spec.compute_dtype) for array in arrays)
    tables = {name: np.zeros(operands.tables[name].shape) for name in inputs.tables}
    return OperandGradients(query, key, value, tables)


# Tasks


def _ranges(spec: Spec, *, in_tiles: bool = False) -> list[tuple[int, int]]:
    """Keys of each task of a kv head; their number depends on the shape alone."""
    least = _KEYS_IN_TILES if in_tiles else _KEYS
    wanted = -(-_TASKS // (spec.batch_size * spec.num_kv_heads))
    number = max(1, min(wanted, spec.kv_len // least, _PARTS))
    size = -(-spec.kv_len // (number * BLOCK_KV)) * BLOCK_KV
    return [(k, min(k + size, spec.kv_len)) for k in range(0, spec.kv_len, size)]


def _in_order(plan: Schedule) -> Schedule:
    """Blocks by batch row, head and query."""
    order = np.lexsort(plan.tasks[:, 2::-1].T)
    return replace(plan, tasks=np.ascontiguousarray(plan.tasks[order]))


def _tasks(
    spec: Spec, plan: Schedule, ranges: list[tuple[int, int]], tables: list[SummedTable]
) -> tuple[Array, list[tuple[int, int]]]:
    """Rows of `TASK`, the longest first, and those of each launch.

    Tasks that would add to the same entries of a large table are in different launches.
    """
    shape = spec.batch_size, spec.num_kv_heads, len(ranges)
    places = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), axis=1)
    tasks = np.zeros((len(places), len(TASK) + len(tables)), np.int64)
    tasks[:, (0, 1, 4)] = places
    tasks[:, 2:4] = np.array(ranges)[places[:, 2]]
    for column, table in enumerate(tables, start=len(TASK)):
        tasks[:, column] = table.copy_of(places) * math.prod(table.shape) * 8
    launch = np.zeros(len(places), np.int64)
    for axis, count in enumerate(shape):
        if any(table.shared[axis] and not table.wide for table in tables):
            launch = launch * count + places[:, axis]
    order = np.lexsort((-_pairs(spec, plan, ranges).reshape(-1), launch))
    edges = [0, *(np.flatnonzero(np.diff(launch[order])) + 1).tolist(), len(order)]
    return np.ascontiguousarray(tasks[order]), list(pairwise(edges))


def _pairs(spec: Spec, plan: Schedule, ranges: list[tuple[int, int]]) -> Array:
    """Pairs of each task, `(batch, kv heads, ranges)`."""
    starts, stops = plan.runs[:, 0], plan.runs[:, 1]
    first, last = plan.tasks[:, 3], plan.tasks[:, 4]
    found = np.empty((len(plan.tasks), len(ranges)), np.int64)
    for n, (start, stop) in enumerate(ranges):
        met = np.maximum(np.minimum(stops, stop) - np.maximum(starts, start), 0)
        ends = np.concatenate([[0], np.cumsum(met)])
        found[:, n] = ends[last] - ends[first]
    by_block = found.reshape(spec.batch_size, spec.num_kv_heads, -1, len(ranges))
    return np.asarray(by_block.sum(axis=2))


# Results


class _Results:
    """Arrays that the kernel writes, and what is left to do with them."""

    def __init__(
        self, problem: Problem, shape: Shape, ranges: int, tables: list[SummedTable]
    ) -> None:
        spec, operands = problem.spec, problem.operands
        compute = spec.compute_dtype
        self.problem = problem
        broadcast = any(
            stride == 0 and size > 1
            for array in (operands.query, plain(operands.key), plain(operands.value))
            for stride, size in zip(array.strides[:-3], array.shape[:-3], strict=True)
        )
        # Rounded once, after all has been added.
        late = broadcast or spec.rotation is not None
        self.dtype = compute if late else operands.query.dtype
        rows = (spec.batch_size, spec.num_heads, spec.q_len, spec.head_dim)
        kv_rows = (spec.batch_size, spec.num_kv_heads, spec.kv_len)
        self.query = np.zeros(rows, self.dtype)
        self.query_parts = self.query[None]
        self.adds_query = ranges > 1 or self.dtype != compute
        if self.adds_query:
            self.query_parts = np.zeros((ranges, *rows), compute)
        self.key, self.key_sums = self._keys((*kv_rows, spec.head_dim), shape.lanes)
        self.value, self.value_sums = self._keys((*kv_rows, spec.v_head_dim), shape.lanes)
        self.tables = {
            t.name: np.zeros((t.copies, *t.shape), np.float64 if t.wide else compute)
            for t in tables
        }

    def _keys(self, shape: tuple[int, ...], lanes: int) -> tuple[Array, Array]:
        """A gradient, and where it is added: in place if its rows are whole vectors."""
        compute = self.problem.spec.compute_dtype
        out = _empty(shape, self.dtype)
        if self.dtype == compute and shape[-1] % lanes == 0:
            return out, out
        return out, _empty((*shape[:-1], padded(shape[-1], lanes)), compute)

    def finish(self) -> OperandGradients:
        operands = self.problem.operands
        query, key = turned_back(
            self.problem,
            self.query.reshape(operands.query.shape),
            self.key.reshape(operands.key.shape),
        )
        value = self.value.reshape(operands.value.shape)
        tables = {name: copies.sum(axis=0) for name, copies in self.tables.items()}
        return OperandGradients(query, key, value, tables)


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = math.prod(shape) * dtype.itemsize
    return page_aligned(size).view(dtype).reshape(shape)


class _BackwardArguments(Arguments):
    """The words of a backward pass."""

    def __init__(
        self,
        problem: Problem,
        inputs: BackwardInputs,
        plan: Schedule,
        tasks: Array,
        results: _Results,
        rows: Rows,
        shape: Shape,
        workers: int,
    ) -> None:
        spec, operands = problem.spec, problem.operands
        item = spec.compute_dtype.itemsize
        if shape.product == "tiles":
            areas = part_areas(shape, spec.head_dim, spec.v_head_dim, shape.together)
        else:
            areas = scratch_areas(shape, spec.head_dim, spec.v_head_dim, item)
        super().__init__(problem, fields_with(tuple(areas)))
        ends = np.cumsum(list(areas.values()))
        per_worker = -(-int(ends[-1]) // 4096) * 4096
        query, key = rotated(problem)
        arrays = {
            "query": query, "key": plain(key), "value": plain(operands.value),
            "out": inputs.out, "grad_out": inputs.grad_out,
        }  # fmt: skip
        fields = {
            **self._common(tasks, per_worker, workers),
            "scale": self._real(operands.scale),
            "blocks": self._address(plan.tasks),
            "runs": self._address(plan.runs),
            "q_blocks": -(-spec.q_len // (shape.block_q * shape.together)),
            "together": shape.together,
            "sinks": 0
            if operands.sinks is None
            else self._address(np.ascontiguousarray(operands.sinks, spec.compute_dtype)),
            "splits": len(results.query_parts),
            "finished": self._address(np.zeros(spec.batch_size * spec.num_kv_heads, np.int64)),
            "query_parts": self._address(results.query_parts),
            "part_bytes": results.query_parts.strides[0],
            "d_query": self._address(results.query),
            "add_query": int(results.adds_query),
            "row_sums": self._address(rows.sums),
            "row_bytes": rows.lse.nbytes,
        }
        for name in ("lse", "lse_rest", "grad_lse", "delta_rest"):
            fields[name] = self._address(getattr(rows, name))
        for name, array in arrays.items():
            fields.update(self._operand(name, array))
        for name in ("key", "value"):
            fields[f"copy_{name}"] = int(arrays[name].strides[-1] != item)
            out, sums = getattr(results, name), getattr(results, f"{name}_sums")
            fields[f"{name}_sums"] = self._address(sums)
            fields[f"{name}_sum_row"] = sums.shape[-1] * item
            fields[f"d_{name}"] = self._address(out)
            fields[f"round_{name}"] = int(out is not sums)
        for name, end, size in zip(areas, ends.tolist(), areas.values(), strict=True):
            fields[f"area_{name}"] = end - size
        more = []
        for copies in results.tables.values():
            more += [self._address(copies), *copies.strides[1:]]
        self._write(fields, more)
