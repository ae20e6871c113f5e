"""The work of the forward kernel for one block of queries: rows in, all runs of keys, output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, POINTER, Value
from qkv.backends.cpu.emit.frame import RowView
from qkv.backends.cpu.forward.frame import ForwardFrame, ScoreVector
from qkv.backends.cpu.forward.layout import BLOCK_KV, RUN, STATS, STATS_SUMS, TASK, StatsRow
from qkv.backends.cpu.forward.products import (
    scores_function,
    selected_values_function,
    values_function,
)
from qkv.backends.cpu.forward.rows import rows_of_block
from qkv.problem.language.expressions import TRUE


class _Areas(NamedTuple):
    """Addresses in a worker's scratch memory, in this order, for one block of queries."""

    packed: Value
    total: Value
    """The output, before it is divided by the row sums."""
    weights: Value
    stats: Value
    key_copy: Value
    value_copy: Value
    transposed: Value
    """Tables of one block of keys."""


def _areas_of(frame: ForwardFrame, scratch: Value, head_dim: Value, v_head_dim: Value) -> _Areas:
    e = frame.e
    row = frame.shape.vectors * e.vector_bytes
    total = e.at(scratch, e.mul(head_dim, row))
    weights = e.at(total, e.mul(v_head_dim, row))
    stats = e.at(weights, BLOCK_KV * row)
    key_copy = e.at(stats, STATS * row)
    value_copy = e.at(key_copy, e.mul(head_dim, BLOCK_KV * e.real_bytes))
    transposed = e.at(value_copy, e.mul(v_head_dim, BLOCK_KV * e.real_bytes))
    return _Areas(scratch, total, weights, stats, key_copy, value_copy, transposed)


def query_block_function(
    frame: ForwardFrame,
    vectors: int,
    functions: dict[str, Value],
    attend_at_boundary: AttendAtBoundary | None,
) -> Value:
    """A function `(arguments, task, scratch)`: one block of queries over its runs of keys."""
    functions = {
        **functions,
        "scores": scores_function(frame, vectors),
        "values": values_function(frame, vectors),
    }
    if "all_finite" in functions:
        functions["selected values"] = selected_values_function(frame, vectors)
    with frame.e.function(f"attend_{vectors}", [POINTER] * 3) as (function, args):
        QueryBlock(frame, vectors, functions, attend_at_boundary, *args).emit()
    return function


class QueryBlock:
    """Emits what is computed for one block of queries."""

    def __init__(
        self,
        frame: ForwardFrame,
        vectors: int,
        functions: dict[str, Value],
        attend_at_boundary: AttendAtBoundary | None,
        arguments: Value,
        task: Value,
        scratch: Value,
    ) -> None:
        self.frame, self.e, self.vectors, self.functions = frame, frame.e, vectors, functions
        self.attend_at_boundary, self.arguments = attend_at_boundary, arguments
        e = self.e
        self.batch, self.head, self.first_row, *self.runs = frame.record(task, TASK)
        group_size, self.num_heads, self.q_len, rows, self.head_dim, self.v_head_dim = frame.words(
            arguments, "group_size", "num_heads", "q_len", "rows", "head_dim", "v_head_dim"
        )
        self.count = e.sub(rows, self.first_row)
        kv_head = e.builder.sdiv(self.head, group_size)
        self.key = frame.operand(arguments, "key", self.batch, kv_head)
        self.value = frame.operand(arguments, "value", self.batch, kv_head)
        self.query = frame.operand(arguments, "query", self.batch, self.head)
        width = vectors * e.vector_bytes
        self.width = e.index(width)
        self.area = _areas_of(frame, scratch, self.head_dim, self.v_head_dim)
        self.rescale, self.block_max = (
            e.at(self.area.stats, row * width) for row in (StatsRow.RESCALE, StatsRow.BLOCK_MAX)
        )

    def emit(self) -> None:
        """All code of the block, from packing its queries to writing their output."""
        e, frame = self.e, self.frame
        self._for_each_vector(self._begin_vector)
        e.clear(self.area.total, 0, e.mul(self.v_head_dim, self.width))
        runs = frame.pointer_field(self.arguments, "runs")

        def attend_to_run(r: Value, _: list[Value]) -> None:
            start, stop, kind = frame.record(runs, RUN, r)
            is_partial = e.builder.icmp_signed("!=", kind, e.index(0))
            e.loop(
                start, stop, BLOCK_KV, [],
                lambda k, _: self._attend_to_block(
                    k, e.least(BLOCK_KV, e.sub(stop, k)), is_partial
                ),
            )  # fmt: skip

        first_run, last_run = self.runs
        e.loop(first_run, last_run, 1, [], attend_to_run)
        head_row = e.mul(e.add(e.mul(self.batch, self.num_heads), self.head), self.q_len)
        place = e.add(head_row, self.first_row)

        def end_vector(offset: Value, first: Value, left: Value) -> None:
            held = e.at(self.area.total, offset), e.at(self.area.stats, offset), e.add(place, first)
            self.call("unpack", self.arguments, *held, self.v_head_dim, self.width, left)

        self._for_each_vector(end_vector)

    def call(self, name: str, *arguments: Value) -> Value:
        return self.e.builder.call(self.functions[name], arguments)

    def _for_each_vector(self, body: Callable[[Value, Value, Value], None]) -> None:
        """`body(offset, first, left)`; a vector beyond the last row repeats that row."""
        e = self.e

        def visit_vector(j: Value, _: list[Value]) -> None:
            first = e.least(e.mul(j, e.lanes), e.sub(self.count, 1))
            body(e.mul(j, e.vector_bytes), first, e.sub(self.count, first))

        e.loop(0, self.vectors, 1, [], visit_vector)

    def _begin_vector(self, offset: Value, first: Value, _: Value) -> None:
        e, stats = self.e, self.area.stats
        to, row = e.at(self.area.packed, offset), e.add(self.first_row, first)
        self.call("pack", self.arguments, self.query.pointer, to, row, self.width)
        e.store_vector(e.const(-math.inf), e.at(stats, offset))
        for row_of_sums in STATS_SUMS:
            e.store_vector(e.const(0.0), e.at(stats, offset, e.mul(self.width, row_of_sums)))

    def _attend_to_block(self, kv_start: Value, keys: Value, is_partial: Value) -> None:
        def attend_to_all_keys() -> None:
            self.attend_together("full", kv_start, keys)

        def attend_to_some_keys() -> None:
            if self.attend_at_boundary is not None:
                self.attend_at_boundary(self, kv_start, keys)
            else:
                self.attend_together("partial", kv_start, keys)

        if self.frame.mask == TRUE:
            attend_to_all_keys()
        else:
            self.e.choose(is_partial, attend_to_some_keys, attend_to_all_keys)

    def attend_together(self, name: str, kv_start: Value, keys: Value) -> None:
        """Attend to the same keys with all vectors of queries."""
        e, area = self.e, self.area
        k, key_row, v, value_row = self.key_and_value_rows(kv_start, keys)
        sizes = (key_row, self.head_dim, keys, value_row, self.v_head_dim)
        self.call("scores", k, area.packed, area.weights, self.block_max, v, *sizes)

        def compute_weights(marked: Value) -> None:
            def weigh_vector(j: Value, _: list[Value]) -> None:
                place = e.at(area.weights, e.mul(j, e.vector_bytes))
                self.call_softmax(name, j, place, kv_start, keys, marked)

            e.loop(0, self.vectors, 1, [], weigh_vector)

        if name == "full" and self.frame.plain:
            compute_weights(ir.Constant(BIT, 0))
            self.add_values("values", v, value_row, keys)
            return
        finite = self.call("all_finite", v, value_row, keys, self.v_head_dim)
        compute_weights(e.builder.not_(finite))
        e.choose(
            finite,
            lambda: self.add_values("values", v, value_row, keys),
            lambda: self.add_values("selected values", v, value_row, keys),
        )

    def key_and_value_rows(self, kv_start: Value, keys: Value) -> tuple[Value, ...]:
        """Addresses and row strides of K and V of so many keys."""

        def rows_of(name: str, rows: RowView, dim: Value, copy: Value) -> tuple[Value, Value]:
            return rows_of_block(
                self.frame, self.arguments, name, rows, kv_start, keys, dim, copy, self.functions
            )

        return (
            *rows_of("key", self.key, self.head_dim, self.area.key_copy),
            *rows_of("value", self.value, self.v_head_dim, self.area.value_copy),
        )

    def call_softmax(
        self, name: str, j: Value, place: Value, kv_start: Value, keys: Value, marked: Value
    ) -> None:
        """Softmax of vector j, whose scores are at `place`."""
        e = self.e
        offset, first = e.mul(j, e.vector_bytes), e.add(self.first_row, e.mul(j, e.lanes))
        at = ScoreVector(
            self.arguments, place, stats=e.at(self.area.stats, offset),
            transposed=self.area.transposed, width=self.width, count=keys, batch=self.batch,
            head=self.head, first_row=first, kv_start=kv_start, marked=marked,
        )  # fmt: skip
        self.call(name, *at)

    def add_values(self, name: str, value: Value, value_row: Value, keys: Value) -> None:
        """Add the values of a block of keys with all vectors of queries."""
        places = value, self.area.weights, self.rescale, self.area.total
        self.call(name, *places, value_row, self.v_head_dim, keys, self.width)


AttendAtBoundary: TypeAlias = Callable[[QueryBlock, Value, Value], None]
"""Emits what a block of queries does with some keys, from the first one on, where a mask's boundary
crosses them."""
