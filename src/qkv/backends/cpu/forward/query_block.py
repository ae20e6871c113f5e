"""The work of the forward kernel for one block of queries: rows in, some keys at a time, output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from llvmlite import ir

from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import RowView
from qkv.backends.cpu.forward.frame import ForwardFrame, ScoreVector
from qkv.backends.cpu.forward.layout import BLOCK_KV, HEADER, RUN, STATS, STATS_SUMS, TASK, StatsRow
from qkv.backends.cpu.forward.rows import is_copied
from qkv.problem.language.expressions import TRUE

NO_KEY = 2**62
"""The number of the next key where no key is left."""


class Areas(NamedTuple):
    """Addresses in a worker's scratch memory: of all blocks of queries of a task, and of one."""

    held: Value
    """Two words: the first of the keys that are copied, and the one after the last."""
    weights: Value
    key_copy: Value
    value_copy: Value
    transposed: Value
    """Tables of one block of keys."""
    run: Value
    """A word: the number of the run of keys that is read."""
    next_key: Value
    """A word: the number of the next key, or `NO_KEY`."""
    packed: Value
    total: Value
    """The output, before it is divided by the row sums."""
    stats: Value


def areas_of(frame: ForwardFrame, arguments: Value, scratch: Value, number: Value) -> Areas:
    """The areas of the task in `scratch`, and of its block of queries of this number."""
    e = frame.e
    head_dim, v_head_dim, q_blocks = frame.words(
        arguments, "head_dim", "v_head_dim", "q_blocks_per_task"
    )
    row = frame.shape.vectors * e.vector_bytes
    weights = e.at(scratch, HEADER)
    key_copy = e.at(weights, BLOCK_KV * row)
    value_copy = e.at(key_copy, e.mul(head_dim, BLOCK_KV * e.real_bytes))
    blocks = e.at(value_copy, e.mul(v_head_dim, BLOCK_KV * e.real_bytes))
    size = e.add(e.mul(e.add(head_dim, v_head_dim), row), HEADER + STATS * row)
    own = e.at(blocks, e.mul(number, size))
    packed = e.at(own, HEADER)
    total = e.at(packed, e.mul(head_dim, row))
    stats = e.at(total, e.mul(v_head_dim, row))
    transposed = e.at(blocks, e.mul(q_blocks, size))
    words = own, e.at(own, WORD)
    return Areas(scratch, weights, key_copy, value_copy, transposed, *words, packed, total, stats)


class QueryBlockFunctions(NamedTuple):
    """Functions `(arguments, task, scratch, number)` of one block of queries of a task."""

    begin: Value
    """The function that packs the queries of the block."""
    advance: Value
    """The function that attends to blocks of keys that begin before a further argument `stop`."""
    end: Value
    """The function that writes the output of the block."""


_ARGUMENTS = *[POINTER] * 3, INT64
"""Types of the arguments that all functions of `QueryBlockFunctions` have."""


def begin_function(frame: ForwardFrame, vectors: int, functions: dict[str, Value]) -> Value:
    """The function `begin` of blocks of so many vectors of queries."""
    with frame.e.function(f"begin_{vectors}", _ARGUMENTS) as (function, args):
        QueryBlock(frame, vectors, functions, None, *args).begin()
    return function


def end_function(frame: ForwardFrame, vectors: int, functions: dict[str, Value]) -> Value:
    """The function `end` of blocks of so many vectors of queries."""
    with frame.e.function(f"end_{vectors}", _ARGUMENTS) as (function, args):
        QueryBlock(frame, vectors, functions, None, *args).end()
    return function


def advance_function(
    frame: ForwardFrame,
    vectors: int,
    functions: dict[str, Value],
    attend_at_boundary: AttendAtBoundary | None,
) -> Value:
    """The function `advance` of blocks of so many vectors of queries."""
    with frame.e.function(f"advance_{vectors}", [*_ARGUMENTS, INT64]) as (function, args):
        *where, stop = args
        QueryBlock(frame, vectors, functions, attend_at_boundary, *where).advance(stop)
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
        number: Value,
    ) -> None:
        self.frame, self.e, self.vectors, self.functions = frame, frame.e, vectors, functions
        self.attend_at_boundary, self.arguments = attend_at_boundary, arguments
        e = self.e
        row = frame.record_at(task, number, TASK)
        self.batch, self.head, self.first_row, *self.runs = frame.record(row, TASK)
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
        self.area = areas_of(frame, arguments, scratch, number)
        self.rescale, self.block_max = (
            e.at(self.area.stats, row * width) for row in (StatsRow.RESCALE, StatsRow.BLOCK_MAX)
        )

    def begin(self) -> None:
        """Pack the queries, and go to the first run of keys."""
        self._for_each_vector(self._begin_vector)
        self.e.clear(self.area.total, 0, self.e.mul(self.v_head_dim, self.width))
        self._go_to_run(self.runs[0])

    def advance(self, stop: Value) -> None:
        """Attend to the blocks of keys that begin before `stop`."""
        e, b = self.e, self.e.builder
        runs = self.frame.pointer_field(self.arguments, "runs")

        def take() -> tuple[Value, Value]:
            k = e.load(self.area.next_key, INT64, WORD)
            return k, e.below(k, stop)

        def attend(k: Value) -> None:
            run = e.load(self.area.run, INT64, WORD)
            _, run_stop, kind = self.frame.record(runs, RUN, run)
            keys = e.least(BLOCK_KV, e.sub(run_stop, k))
            self._attend_to_block(k, keys, b.icmp_signed("!=", kind, e.index(0)))
            following = e.add(k, BLOCK_KV)
            e.choose(
                e.below(following, run_stop),
                lambda: e.store(following, self.area.next_key, WORD),
                lambda: self._go_to_run(e.add(run, 1)),
            )

        e.take_while(take, attend)

    def end(self) -> None:
        """Write the output."""
        e = self.e
        head_row = e.mul(e.add(e.mul(self.batch, self.num_heads), self.head), self.q_len)
        place = e.add(head_row, self.first_row)

        def end_vector(offset: Value, first: Value, left: Value) -> None:
            held = e.at(self.area.total, offset), e.at(self.area.stats, offset), e.add(place, first)
            self.call("unpack", self.arguments, *held, self.v_head_dim, self.width, left)

        self._for_each_vector(end_vector)

    def _go_to_run(self, run: Value) -> None:
        e = self.e
        runs = self.frame.pointer_field(self.arguments, "runs")
        key = e.either(
            e.below(run, self.runs[1]),
            lambda: self.frame.record(runs, RUN, run)[RUN.index("start")],
            lambda: e.index(NO_KEY),
        )
        e.store(run, self.area.run, WORD)
        e.store(key, self.area.next_key, WORD)

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
        self.call(f"scores_{self.vectors}", k, area.packed, area.weights, self.block_max, v, *sizes)

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
            lambda: self.add_values("selected_values", v, value_row, keys),
        )

    def key_and_value_rows(self, kv_start: Value, keys: Value) -> tuple[Value, ...]:
        """Addresses and row strides of K and V of so many keys, copied if they must be."""
        e, b, area, frame = self.e, self.e.builder, self.area, self.frame
        copied = [is_copied(frame, self.arguments, name) for name in ("key", "value")]
        with b.if_then(b.or_(*copied)):
            places = self.arguments, area.held, *self.key, area.key_copy
            self.call("hold", *places, *self.value, area.value_copy, kv_start, keys)
        first = e.sub(kv_start, e.load(area.held, INT64, WORD))

        def rows_of(needed: Value, rows: RowView, dim: Value, copy: Value) -> tuple[Value, Value]:
            dense = e.mul(dim, e.real_bytes)
            row = b.select(needed, dense, rows.row)
            place = b.select(needed, e.mul(first, dense), e.mul(kv_start, rows.row))
            return e.at(b.select(needed, copy, rows.pointer), place), row

        return (
            *rows_of(copied[0], self.key, self.head_dim, area.key_copy),
            *rows_of(copied[1], self.value, self.v_head_dim, area.value_copy),
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
        sizes = value_row, self.v_head_dim, keys, self.width
        self.call(f"{name}_{self.vectors}", *places, *sizes)


AttendAtBoundary: TypeAlias = Callable[[QueryBlock, Value, Value], None]
"""Emits what a block of queries does with some keys, from the first one on, where a mask's boundary
crosses them."""
