"""The host side of second derivatives: what the kernel takes, its tasks, and its results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.backward.layout import TableGradient
from qkv.backends.cpu.compiler.compile import EmitFunction, Kernel, build
from qkv.backends.cpu.emit.argument_block import operand_fields
from qkv.backends.cpu.forward.layout import skips_keys_within_blocks
from qkv.backends.cpu.machine.host import Host, host
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.passes.arguments import Arguments, rotated_operands
from qkv.backends.cpu.passes.forward import operations_of_a_pair
from qkv.backends.cpu.passes.workers import Workload
from qkv.backends.cpu.plan.kernel_spec import integer_bits, kernel_spec
from qkv.backends.cpu.plan.schedule import Schedule, fine_tile, schedule
from qkv.backends.cpu.plan.table_gradients import (
    SummedTable,
    launches_of,
    ranges_of,
    summed_table,
)
from qkv.backends.cpu.products.layout import round_to_pages, round_to_vectors
from qkv.backends.cpu.rows.rotation import rotated_rows
from qkv.backends.cpu.tangents.layout import (
    BLOCK_KV,
    FIELDS,
    OPERANDS,
    ROWS,
    TASK,
    TangentKey,
    kept_blocks,
    scratch_areas,
    shared_with,
)
from qkv.problem.backward import OperandGradients, reads
from qkv.problem.language.derivative import derivative, tangent
from qkv.problem.scores import Scores
from qkv.problem.second_derivatives.passes import (
    Cotangents,
    ForwardTangents,
    SecondDerivatives,
)
from qkv.problem.second_derivatives.tangents import SCALED_DOT, Direction, OperandTangents
from qkv.problem.spec import Problem, Spec, TableSpec
from qkv.problem.stored_rows import plain

Array = NDArray[Any]

_EMIT_TANGENTS = EmitFunction("qkv.backends.cpu.tangents.kernel", "emit_tangents")

_TASK_BLOCKS, _PART_BLOCKS = 8, 32
"""Blocks of queries of a task, and of a part of dK and dV, that make it cheap to begin one."""
_MOST_PARTS, _PARTS_BYTES = 8, 2**23
"""The most parts of dK and dV, and the bytes that those of one key head may take if there are more
than one."""
_TASK_OPERATIONS = 2e9
"""Operations of a task, for which Ctrl-C may have to wait."""


def second_derivatives(
    problem: Problem, tangents: OperandTangents, cotangents: Cotangents | None
) -> SecondDerivatives | None:
    """Tangents of output and lse, and with cotangents those of all gradients.

    None if there is nothing to compute.
    """
    spec = problem.spec
    if 0 in (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len):
        return None
    direction = Direction(Scores(problem, spec.compute_dtype), tangents)
    operands = _Operands(direction, cotangents)
    run = _TangentPass(direction, cotangents)
    results = _Results(direction, run)
    workers = run.workers()
    run.launch(_TangentArguments(run, operands, results, workers), workers)
    return results.finish()


def _sum_of_parts(parts: Array) -> Array:
    return parts[0] if len(parts) == 1 else np.asarray(parts.sum(axis=0))


class _Operands:
    """Arrays as the kernel reads them, `(*batch_shape, heads, rows, dim)`."""

    def __init__(self, direction: Direction, cotangents: Cotangents | None) -> None:
        spec, dtype = direction.spec, direction.scores.dtype
        named: dict[str, Array] = {}
        for kind, problem in (("", direction.problem), ("_dot", direction.moves)):
            query, key = rotated_operands(problem)
            rows = {"query": query, "key": plain(key), "value": plain(problem.operands.value)}
            named |= {f"{name}{kind}": array for name, array in rows.items()}
        self.grad_lse = None
        if cotangents is not None:
            named["grad_out"] = cotangents.grad_out
            self.grad_lse = np.ascontiguousarray(cotangents.grad_lse, dtype)
        self.arrays = {name: _readable(array, dtype) for name, array in named.items()}
        sinks, sinks_dot = direction.sinks, direction.sinks_dot
        self.sinks = np.full(spec.num_heads, -np.inf, dtype)
        if sinks is not None:
            self.sinks[:] = sinks
        self.sinks_dot = np.zeros(spec.num_heads, dtype)
        if sinks_dot is not None:
            self.sinks_dot[:] = sinks_dot


def _readable(array: Array, dtype: np.dtype[Any]) -> Array:
    """The array in a type, with adjacent elements; rows that it repeats are not copied for each."""
    fits = array.dtype == dtype and array.flags.aligned
    if fits and (array.strides[-1] == dtype.itemsize or array.shape[-1] <= 1):
        return array
    repeated = zip(array.shape[:-2], array.strides[:-2], strict=True)
    once = array[tuple(slice(0, 1) if step == 0 else slice(None) for _, step in repeated)]
    return np.broadcast_to(np.array(once, dtype, order="C"), array.shape)


class _TangentPass(Workload):
    """The pass over one problem: its kernel, its tasks, and how many threads share them."""

    def __init__(self, direction: Direction, cotangents: Cotangents | None) -> None:
        here, spec, backward = host(), direction.spec, cotangents is not None
        self.problem = problem = _with_tables(direction)
        self.backward, self.dtype = backward, spec.compute_dtype
        self.shape = here.shape_of(spec.compute_dtype)
        self.plan = _schedule(problem, self.shape.block_q)
        self.q_blocks = -(-spec.q_len // self.shape.block_q)
        names = frozenset() if cotangents is None else cotangents.tables
        of_keys, of_values = (7, 5) if backward else (3, 2)
        products = of_keys * spec.head_dim + of_values * spec.v_head_dim
        operations = 2.0 * products * self.plan.pairs
        others = 3 * operations_of_a_pair(spec) * self.plan.pairs
        ranges = _query_ranges(spec, self.q_blocks, backward=backward)
        self.parts = len(ranges)
        self.tables = [summed_table(problem, name, self.parts, "q_index") for name in sorted(names)]
        count = spec.batch_size * spec.num_kv_heads * self.parts
        steps = math.ceil(operations / count / _TASK_OPERATIONS) if backward else 1
        self.tasks, self._launches = _task_rows(spec, ranges, self.tables, steps)
        self.scratch_bytes = scratch_of(spec, self.shape, backward=backward)
        super().__init__(len(self.tasks), operations, "elements", others)
        loads = reads(spec, names)
        key = TangentKey(
            replace(kernel_spec(problem.spec), dtype=spec.compute_dtype.name),
            self.shape,
            integer_bits(problem),
            backward,
            direction.score_dot,
            tangent(derivative(spec.score), direction.tangent_of),
            SCALED_DOT,
            tuple(TableGradient(table.name, table.wide) for table in self.tables),
            tuple(tangent(derivative(spec.score, t), direction.tangent_of) for t in loads),
        )
        self.kernel = _kernel(key, here)

    def launch(self, arguments: Arguments, workers: int) -> None:
        self.run(self.kernel, arguments, workers, self._launches)


def scratch_of(spec: Spec, shape: TileShape, *, backward: bool) -> int:
    """Memory of one worker: whole pages."""
    areas = scratch_areas(spec, shape, backward=backward)
    return round_to_pages(sum(areas.values()))


def _with_tables(direction: Direction) -> Problem:
    """The problem with the tangents of tables as tables of their own."""
    problem, spec = direction.problem, direction.spec
    known = {table.name for table in spec.tables}
    more = tuple(
        TableSpec(name, "", "float", array.dtype.name, array.ndim)
        for name, array in sorted(direction.tables.items())
        if name not in known
    )
    return replace(
        problem,
        spec=replace(spec, tables=(*spec.tables, *more)),
        operands=replace(problem.operands, tables=direction.tables),
    )


def _schedule(problem: Problem, block_q: int) -> Schedule:
    """The keys of each block of queries, in whole blocks where the forward pass takes such."""
    tile_kv = fine_tile(problem, block_q)
    whole_blocks = tile_kv < BLOCK_KV and skips_keys_within_blocks(problem.spec.mask)
    return schedule(
        problem,
        block_q,
        tile_kv=tile_kv,
        block_kv=BLOCK_KV if whole_blocks else None,
        in_quarters=False,
    ).ordered()


def _query_ranges(spec: Spec, q_blocks: int, *, backward: bool) -> list[tuple[int, int]]:
    """The blocks of queries of each split of a kv head.

    Splits have parts of dK and dV, which are added up. So their number follows from the lengths
    alone, and no bit depends on how many heads or batch rows there are.
    """
    parts = -(-q_blocks // _TASK_BLOCKS)
    if backward:
        part = spec.kv_len * (spec.head_dim + spec.v_head_dim) * spec.compute_dtype.itemsize
        parts = min(q_blocks // _PART_BLOCKS, _MOST_PARTS, _PARTS_BYTES // max(part, 1))
    size = -(-q_blocks // max(parts, 1))
    return [(n, min(n + size, q_blocks)) for n in range(0, q_blocks, size)]


def _task_rows(
    spec: Spec, ranges: list[tuple[int, int]], tables: list[SummedTable], steps: int = 1
) -> tuple[Array, list[tuple[int, int]]]:
    """Rows of `TASK`, and the range of rows of each launch.

    The queries of a split are up to `steps` tasks, one after the other.
    """
    shape = spec.batch_size, spec.num_kv_heads, len(ranges)
    places = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), axis=1)
    split = places[:, 2]
    copies = [t.copy_of(places) * math.prod(t.shape) * 8 for t in tables]
    starts, stops = np.array(ranges).T
    steps = max(1, min(steps, int((stops - starts).min())))
    launch = launches_of(tables, places, shape) * steps
    rows, launches = [], []
    for step in range(steps):
        first, last = (starts + (stops - starts) * n // steps for n in (step, step + 1))
        is_first = np.full(len(places), step == 0)
        words = [*places.T[:2], first[split], last[split], split, is_first, *copies]
        rows.append(np.stack(words, axis=1).astype(np.int64))
        launches.append(launch + step)
    tasks, launch = np.concatenate(rows), np.concatenate(launches)
    # The last queries, which see most keys if a mask is causal, come first.
    order = np.lexsort((-tasks[:, TASK.index("split")], launch))
    return np.ascontiguousarray(tasks[order]), ranges_of(launch[order])


@lru_cache(maxsize=256)
def _kernel(key: TangentKey, here: Host) -> Kernel:
    return Kernel(build(_EMIT_TANGENTS, (key,), here, shared=shared_with(key)))


class _Results:
    """What the kernel writes."""

    def __init__(self, direction: Direction, run: _TangentPass) -> None:
        self.direction, self.spec = direction, direction.spec
        self.backward = run.backward
        self.tables = {
            t.name: np.zeros((t.copies, *t.shape), np.float64 if t.wide else run.dtype)
            for t in run.tables
        }
        spec, dtype = self.spec, self.spec.compute_dtype
        heads, kv_heads = spec.batch_size * spec.num_heads, spec.batch_size * spec.num_kv_heads
        self.out_dot = np.empty((heads, spec.q_len, spec.v_head_dim), dtype)
        names = ROWS if run.backward else ROWS[:1]
        self.rows = {name: np.zeros((heads, spec.q_len)) for name in names}
        self.query = np.empty((heads, spec.q_len, spec.head_dim if run.backward else 0), dtype)
        lanes, parts = run.shape.lanes, run.parts if run.backward else 0
        self.key, self.value = (
            np.empty((parts, kv_heads, spec.kv_len, round_to_vectors(dim, lanes)), dtype)
            for dim in (spec.head_dim, spec.v_head_dim)
        )

    def finish(self) -> SecondDerivatives:
        """The results in the shapes of the batch."""
        spec, problem = self.spec, self.direction.problem
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len)
        lse = self.rows["lse_dot"].astype(spec.compute_dtype).reshape(shape)
        forward = ForwardTangents(self.out_dot.reshape(*shape, spec.v_head_dim), lse)
        if not self.backward:
            return SecondDerivatives(forward)
        operands = problem.operands
        query = self.query.reshape(operands.query.shape)
        key, value = (
            _sum_of_parts(parts)[..., : shape[-1]].reshape(shape)
            for parts, shape in (
                (self.key, operands.key.shape), (self.value, operands.value.shape),
            )
        )  # fmt: skip
        tables = {name: copies.sum(axis=0) for name, copies in self.tables.items()}
        if spec.rotation is not None:
            query = rotated_rows(problem, query, "q", back=True)
            key = rotated_rows(problem, key, "kv", back=True)
        gradients = OperandGradients(query, key, value, tables)
        return SecondDerivatives(forward, gradients, self._of_sinks())

    def _of_sinks(self) -> Array:
        """The tangents of the gradients of sinks: a sink acts as a key with value 0."""
        lse_dot, delta, delta_dot, share = (self.rows[name] for name in ROWS)
        sinks_dot = self.direction.sinks_dot
        moved = 0.0 if sinks_dot is None else np.tile(sinks_dot, self.spec.batch_size)[:, None]
        share_dot = share * (moved - lse_dot)
        of_rows = -(share_dot * delta + share * delta_dot).sum(axis=-1)
        total: Array = of_rows.reshape(self.spec.batch_size, -1).sum(axis=0)
        return total


class _TangentArguments(Arguments):
    """The words of one call."""

    def __init__(
        self, run: _TangentPass, operands: _Operands, results: _Results, workers: int
    ) -> None:
        spec = run.problem.spec
        areas = scratch_areas(spec, run.shape, backward=run.backward)
        super().__init__(run.problem, (*FIELDS, *(f"area_{name}" for name in areas)))
        ends = np.cumsum(list(areas.values()))
        rows = {f"{name}_rows": results.rows.get(name) for name in ROWS}
        arrays = {
            "grad_lse": operands.grad_lse, **rows,
            "sinks": operands.sinks, "sinks_dot": operands.sinks_dot,
            "out_dot": results.out_dot, "d_query_dot": results.query,
            "key_sums": results.key, "value_sums": results.value,
        }  # fmt: skip
        more = []
        for copies in results.tables.values():
            more += [self._address(copies), *copies.strides[1:]]
        fields = {
            **self._common_fields(run.tasks, run.scratch_bytes, workers),
            "scale": self._real_bits(run.problem.operands.scale),
            "blocks": self._address(run.plan.tasks),
            "runs": self._address(run.plan.runs),
            "q_blocks": run.q_blocks,
            "kept_blocks": kept_blocks(spec.kv_len),
            **{n: 0 if array is None else self._address(array) for n, array in arrays.items()},
            **self._fields_of_operands(operands.arrays),
            "key_sum_row": results.key.strides[-2],
            "key_part": results.key.strides[0],
            "value_sum_row": results.value.strides[-2],
            "value_part": results.value.strides[0],
            **dict(zip((f"area_{name}" for name in areas), [0, *ends.tolist()], strict=False)),
        }  # fmt: skip
        self._write(fields, more)

    def _fields_of_operands(self, arrays: Mapping[str, Array]) -> dict[str, int]:
        """The words of the arrays that are read; 0 for those that are not there."""
        fields = dict.fromkeys(operand_fields(*OPERANDS), 0)
        for name, array in arrays.items():
            fields |= self._operand_fields(name, array)
        return fields
