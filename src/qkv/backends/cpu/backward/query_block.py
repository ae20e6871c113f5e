"""The work of a backward task for one block of queries: rows in, all blocks of keys, dQ out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.backward.block_of_queries import BlockCall, BlockOfQueries
from qkv.backends.cpu.backward.frame import DELTA_REST, EXPECTED_SUM, VECTOR_AREAS, BackwardFrame
from qkv.backends.cpu.backward.layout import BLOCK_KV, TASK
from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import BIT, Value
from qkv.backends.cpu.emit.frame import RowView
from qkv.backends.cpu.emit.storage import real_dtype
from qkv.backends.cpu.forward.boundary_blocks import Range, are_narrow, for_each_step, read_range
from qkv.backends.cpu.forward.layout import RUN
from qkv.backends.cpu.forward.rows import rows_of_block
from qkv.backends.cpu.products.bfloat16 import emit_round_to_chunks
from qkv.problem.language.expressions import TRUE

PAIRS_OF = {"query": "query_pairs", "grad_out": "grad_pairs"}
"""The areas that hold packed rows as pairs of bfloat16, by the area of the rows."""


class _KeySums(NamedTuple):
    """Arguments of `key_sums` for dV or dK; `row` is in bytes, `columns` is a number of vectors."""

    left: Value
    rows: Value
    sums: Value
    row: Value
    columns: Value


class QueryBlockPass(BlockOfQueries):
    """Emits what is computed for one block of queries and the keys of one task."""

    def __init__(
        self, frame: BackwardFrame, vectors: int, functions: dict[str, Value], call: BlockCall
    ) -> None:
        super().__init__(frame, vectors, functions, call)
        e = self.e
        _, _, self.start, self.stop, self.split = frame.record(call.task, TASK)
        self.columns = {
            name: e.builder.sdiv(e.add(self.dims[name], e.lanes - 1), e.index(e.lanes))
            for name in ("query", "grad_out")
        }
        self.keys, self.values = (
            frame.operand(call.arguments, name, self.batch, self.kv_head)
            for name in ("key", "value")
        )
        self.finite: Value = ir.Constant(BIT, 1)
        if frame.corrects_sums:
            self.sees_one_block = self._is_only_block()

    def emit(self) -> None:
        """All code of the block, from packing its queries to writing their dQ."""
        self.begin()
        self.for_each_key_block(self.add_block)
        self.end()

    def areas(self, *names: str) -> list[Value]:
        return [self.area[name] for name in names]

    def begin(self) -> None:
        """Pack and transpose Q and dO, see whether they are finite, and compute delta."""
        e, frame = self.e, self.frame
        self.for_each_vector(self._pack_vector)
        for name, transposed in (("query", "query_rows"), ("grad_out", "grad_rows")):
            columns = self.columns[name]
            end = e.mul(columns, e.lanes, self.width)
            e.clear(self.area[name], e.mul(self.dims[name], self.width), end)
            self.call("transpose", *self.areas(name, transposed), columns, self.width)
            if frame.in_pairs:
                pairs = self.area[PAIRS_OF[name]]
                self.call("pair", self.area[name], self.dims[name], self.width, pairs)
                self._pair_queries(transposed, columns)
            if frame.may_forbid:
                lanes = e.index(self.vectors * e.lanes)
                shape = self.width, self.dims[name], lanes
                finite = self.call("all_finite", self.area[name], *shape)
                self.finite = e.builder.and_(self.finite, finite)
        e.clear(self.area["query_sums"], 0, e.mul(self.dims["query"], self.width))

    def _pair_queries(self, name: str, columns: Value) -> None:
        """Transposed Q or dO as pairs of queries, of which those that do not exist are 0."""
        e, queries = self.e, self.vectors * self.e.lanes
        pair = "pair_finite" if self.frame.may_forbid else "pair"

        def pair_matrices(first: Value, count: Value, beside: int) -> None:
            """Pair `count` matrices, `beside` vectors wide, from column `first` on."""
            start, width = e.mul(first, e.lanes, self.width), beside * e.vector_bytes
            place = e.at(self.area[name], start)

            def clear_rest(n: Value, _: list[Value]) -> None:
                row = e.mul(n, queries)
                e.clear(
                    place, e.mul(e.add(row, self.rows), width), e.mul(e.add(row, queries), width)
                )

            e.loop(0, count, 1, [], clear_rest)
            to = e.at(self.area[f"{name}_narrow"], e.builder.sdiv(start, e.index(2)))
            self.call(pair, place, e.mul(count, queries), e.index(width), to)

        many = self.frame.shape.vectors
        whole = e.round_down(columns, many)
        pair_matrices(e.index(0), e.builder.sdiv(columns, e.index(many)), many)
        if many > 1:
            pair_matrices(whole, e.sub(columns, whole), 1)

    def _pack_rows(self, offset: Value, first: Value, dtype: str, rows: RowView, dim: Value,
                   to: str) -> None:  # fmt: skip
        e = self.e
        where = e.add(self.first_row, first), self.last, dim
        self.call(f"pack {dtype}", *rows, *where, e.at(self.area[to], offset), self.width)

    def _pack_operand(self, offset: Value, first: Value, name: str, dim: str, to: str) -> None:
        rows = self.frame.operand(self.arguments, name, self.batch, self.head)
        self._pack_rows(offset, first, self.frame.dtypes[name], rows, self.dims[dim], to)

    def _pack_column(self, offset: Value, first: Value, name: str, to: str) -> None:
        e = self.e
        start = self.frame.pointer_field(self.arguments, name)
        pointer = e.at(start, e.mul(self.head_row, e.real_bytes))
        column = RowView(pointer, e.index(e.real_bytes), e.index(0))
        self._pack_rows(offset, first, real_dtype(e), column, e.index(1), to)

    def _pack_vector(self, offset: Value, first: Value) -> None:
        e = self.e
        self._pack_operand(offset, first, "query", "query", "query")
        for name in ("lse", "lse_rest"):
            self._pack_column(offset, first, name, name)
        self._pack_operand(offset, first, "grad_out", "grad_out", "grad_out")
        # The area of dQ is not in use yet, so it holds O until delta is computed.
        self._pack_operand(offset, first, "out", "value", "query_sums")
        self._pack_column(offset, first, "grad_lse", "delta")
        if self.frame.has_delta_rest:
            rest = e.add(offset, e.mul(self.width, DELTA_REST))
            self._pack_column(rest, first, "delta_rest", "delta")
        held = (e.at(area, offset) for area in self.areas("grad_out", "query_sums", "delta"))
        self.call("delta", *held, self.dims["value"], self.width)

    def _is_only_block(self) -> Value:
        """Whether these queries see one block of keys, and that belongs to this task."""
        e, b = self.e, self.e.builder
        runs = self.frame.pointer_field(self.arguments, "runs")
        first, end, _ = self.frame.record(runs, RUN, self.first_run)
        only = b.icmp_signed("==", e.sub(self.last_run, self.first_run), e.index(1))
        inside = b.and_(e.below(e.sub(self.start, 1), first), e.below(end, e.add(self.stop, 1)))
        short = e.below(e.sub(end, first), BLOCK_KV + 1)
        return b.and_(b.and_(only, inside), short)

    def _store_expected_sum(self, offset: Value, first: Value) -> None:
        """Store what the dS of a row should add up to: d lse, less the dS of a sink."""
        e, b = self.e, self.e.builder
        place = e.add(offset, e.mul(self.width, EXPECTED_SUM))
        self._pack_column(place, first, "grad_lse", "lse")
        sinks = self.field("sinks")
        with b.if_then(b.icmp_signed("!=", sinks, e.index(0))):
            lse, rest, delta, second = (
                e.load_vector(e.at(self.area[name], offset, e.mul(self.width, row)))
                for name, row in (("lse", 0), ("lse_rest", 0), ("delta", 0), ("delta", 1))
            )
            at = e.at(e.pointer(sinks), e.mul(self.head, e.real_bytes))
            sink = e.splat(e.load(at, e.real, e.real_bytes))
            away = b.fsub(b.fsub(sink, lse), rest)
            # A sink of infinity has all the weight.
            is_infinite = b.fcmp_ordered("==", sink, e.const(math.inf))
            weight = vector_math.exp(e, b.select(is_infinite, e.const(0.0), away))
            expected = e.at(self.area["lse"], place)
            total = e.fma(weight, b.fadd(delta, second), e.load_vector(expected))
            e.store_vector(total, expected)

    def for_each_key_block(self, body: Callable[[Value, Value, Value], None]) -> None:
        """Emit `body(kv_start, count, kind)` for every block of keys."""
        e, frame = self.e, self.frame
        runs = frame.pointer_field(self.arguments, "runs")

        def for_run(r: Value, _: list[Value]) -> None:
            first, end, kind = frame.record(runs, RUN, r)
            first, end = e.larger_of(first, self.start), e.least(end, self.stop)
            e.loop(
                first, end, BLOCK_KV, [],
                lambda k, _: body(k, e.least(BLOCK_KV, e.sub(end, k)), kind),
            )  # fmt: skip

        e.loop(self.first_run, self.last_run, 1, [], for_run)

    def add_block(self, kv_start: Value, count: Value, kind: Value) -> None:
        """Compute P, dS and dX of one block of keys, and add them to dQ, dV and dK."""
        frame = self.frame
        partial = self.e.builder.icmp_signed("!=", kind, self.e.index(0))
        rows_of, packed = self._adjacent_rows, {"key": "query", "value": "grad_out"}
        if frame.in_pairs:
            rows_of, packed = self._paired_rows, {name: PAIRS_OF[of] for name, of in packed.items()}
        key = rows_of("key", self.keys, kv_start, count)
        held = self.areas(
            packed["key"], "lse", "lse_rest", "weights" if frame.plain else "products"
        )
        self.call(
            f"products {self.vectors}",
            self.arguments,
            key[0],
            *held,
            key[1],
            self.dims["key"],
            count,
        )
        self._compute_weights(kv_start, count, partial)
        value = rows_of("value", self.values, kv_start, count)
        if frame.spec.dropout:
            self._call_by_vector("dropout", kv_start, count)
        held = self.areas(packed["value"], "delta", "weights", "factors", "score_grads")
        self.call(
            f"score_gradients {self.vectors}",
            self.arguments,
            value[0],
            *held,
            value[1],
            self.dims["value"],
            count,
        )
        if frame.corrects_sums:
            with self.e.builder.if_then(self.sees_one_block):
                self.for_each_vector(self._store_expected_sum)
                self._call_by_vector("correct_sums", kv_start, count)
        if frame.spec.dropout:
            self._call_by_vector("drop_weights", kv_start, count)
        if frame.applies_chain_rule:
            self._call_by_vector("chain_rule", kv_start, count)
        self._add_gradients(key, kv_start, count, partial)

    def _compute_weights(self, kv_start: Value, count: Value, partial: Value) -> None:
        frame = self.frame

        def compute(name: str) -> None:
            self._call_by_vector(name, kv_start, count)

        if frame.plain and frame.mask != TRUE:
            with self.e.builder.if_then(partial):
                compute("partial")
        elif frame.mask != TRUE:
            self.e.choose(partial, lambda: compute("partial"), lambda: compute("full"))
        elif not frame.plain:
            compute("full")

    def _call_by_vector(self, name: str, kv_start: Value, count: Value) -> None:
        e = self.e

        def call_for_vector(offset: Value, first: Value) -> None:
            # A vector beyond the last row repeats that row, and its results are not used.
            held = (e.at(area, offset) for area in self.areas(*VECTOR_AREAS))
            where = self.batch, self.head, e.add(self.first_row, first), e.sub(self.rows, first)
            self.call(name, self.arguments, self.task, *held, self.width, count, *where, kv_start)

        self.for_each_vector(call_for_vector)

    def _add_gradients(
        self, key: tuple[Value, Value], kv_start: Value, count: Value, partial: Value
    ) -> None:
        """Add to dQ, dV and dK, without forbidden pairs where 0 * inf would be NaN."""
        e, frame = self.e, self.frame

        def add_query(name: str, rows: tuple[Value, Value], grads: str = "score_grads") -> None:
            held = self.areas(grads, "weights", "query_sums")
            where = rows[0], *held, rows[1], self.dims["key"], count
            self.call(f"{name} {self.vectors}", *where)

        def add_to_query(rows: tuple[Value, Value] = key) -> None:
            if "interleave" in self.functions:
                to = self.area["keys_interleaved"]
                self.call("interleave", *rows, count, self.dims["key"], to)
                rows = to, rows[1]
            packed = "score_grad_pairs" if frame.in_pairs else "score_grads"
            add_query("query_sums", rows, packed)

        def add_all_keys() -> None:
            everyone = e.index(0), e.index(self.vectors)
            self._add_keys(kv_start, *everyone, e.index(0), count)

        def add_what_is_left_out() -> None:
            """Add what is not finite by itself: in products of bfloat16 it counts as 0."""
            if frame.in_pairs and frame.may_forbid:
                with e.builder.if_then(e.builder.not_(self.finite), likely=False):
                    self._add_selected_keys(kv_start, count)

        def add_seen_keys() -> None:
            e.choose(partial, lambda: self._add_seen_keys(kv_start, count), add_all_keys)

        def add_all() -> None:
            add_to_query()
            add_all_keys()
            add_what_is_left_out()

        def add_allowed() -> None:
            finite = self.call("all_finite", *key, count, self.dims["key"])
            e.choose(finite, add_to_query, lambda: add_query("selected_query_sums", key))
            e.choose(self.finite, add_seen_keys, lambda: self._add_selected_keys(kv_start, count))

        def add_allowed_pairs() -> None:
            wide = self._adjacent_rows("key", self.keys, kv_start, count)
            finite = self.call("all_finite", *wide, count, self.dims["key"])

            def add_finite_part() -> None:
                dim, to = self.dims["key"], self.area["key_pairs"]
                self.call("narrow_finite", *wide, dim, count, to)
                add_to_query((to, e.mul(2, emit_round_to_chunks(e, dim))))
                add_query("selected_query_sums", wide)

            e.choose(finite, add_to_query, add_finite_part)
            add_seen_keys()
            add_what_is_left_out()

        if frame.in_pairs:
            narrow = self.areas("weights_narrow", "score_grads_narrow", "score_grad_pairs")
            held = self.areas("weights", "score_grads")
            self.call(f"round_pairs {self.vectors}", *held, count, *narrow)
        allowed = add_allowed_pairs if frame.in_pairs else add_allowed
        if not frame.may_forbid:
            add_all()
        elif frame.plain:
            e.choose(partial, allowed, add_all)
        else:
            allowed()

    def _key_sums(self, kv_start: Value, kind: str = "") -> Iterator[_KeySums]:
        """The sums of dV, then those of dK, of the keys from `kv_start` on.

        `kind` is "_narrow" if their factors are bfloat16.
        """
        e, frame = self.e, self.frame
        for of, left, rows, packed in (
            ("value", f"weights{kind}", f"grad_rows{kind}", "grad_out"),
            ("key", f"score_grads{kind}", f"query_rows{kind}", "query"),
        ):
            row = self.field(f"{of}_sum_row")
            pointer = frame.pointer_field(self.arguments, f"{of}_sums")
            sums = e.at(pointer, e.mul(e.add(self.kv_row, kv_start), row))
            yield _KeySums(self.area[left], self.area[rows], sums, row, self.columns[packed])

    def _add_keys(self, kv_start: Value, first: Value, stop: Value, k: Value, keys: Value) -> None:
        """Add `keys` keys from k on to dV and dK, for the vectors from `first` to `stop`."""
        e = self.e
        row = e.mul(first, e.lanes)
        count = e.sub(e.least(e.mul(stop, e.lanes), self.rows), row)
        kind, item = ("_narrow", 2) if self.frame.in_pairs else ("", e.real_bytes)
        width = e.index(self.vectors * e.lanes * item)
        offset = e.add(e.mul(k, width), e.mul(first, e.lanes * item))
        for of in self._key_sums(kv_start, kind):
            held = e.at(of.left, offset), of.rows, e.at(of.sums, e.mul(k, of.row))
            self.call("key_sums", *held, of.row, of.columns, keys, row, count, width)

    def _add_seen_keys(self, kv_start: Value, count: Value) -> None:
        """Add each step of keys to dV and dK, for the vectors that may see it."""
        e = self.e

        def add_keys(first: Value, stop: Value, k: Value, keys: Value) -> None:
            self._add_keys(kv_start, first, stop, k, keys)

        def add_all_vectors() -> None:
            add_keys(e.index(0), e.index(self.vectors), e.index(0), count)

        if not self.frame.skips_keys_within_blocks or self.vectors == 1:
            add_all_vectors()
            return
        ranges = [self._seen_range(j, kv_start, count) for j in range(self.vectors)]
        apart = are_narrow(e, ranges, count)
        e.choose(apart, lambda: for_each_step(e, ranges, count, add_keys), add_all_vectors)

    def _add_selected_keys(self, kv_start: Value, count: Value) -> None:
        """Add all keys to dV and dK, without forbidden pairs, where a row is not finite."""
        for of in self._key_sums(kv_start):
            held = of.left, of.rows, self.area["weights"], of.sums, of.row, of.columns
            self.call("selected_key_sums", *held, count, self.rows, self.width)

    def _seen_range(self, j: int, kv_start: Value, count: Value) -> Range:
        """The range of keys of a block that the queries of vector j may see."""
        e, key_range, before = self.e, self.e.stack_words(2), j * self.e.lanes
        rows = e.add(self.first_row, before), e.sub(self.rows, before)
        where = self.batch, self.head, *rows, kv_start, count
        self.call("seen_range", self.arguments, *where, key_range)
        return read_range(e, key_range)

    def _adjacent_rows(
        self, name: str, rows: RowView, kv_start: Value, count: Value
    ) -> tuple[Value, Value]:
        """A block of K or V with adjacent elements: where it lies, or copied."""
        return rows_of_block(
            self.frame, self.arguments, name, rows, kv_start, count, self.dims[name],
            self.area[f"{name}_copy"], self.functions,
        )  # fmt: skip

    def _paired_rows(
        self, name: str, rows: RowView, kv_start: Value, count: Value
    ) -> tuple[Value, Value]:
        """A block of K or V in pairs of neighbours: where it lies, or copied."""
        e, b, dim = self.e, self.e.builder, self.dims[name]
        here, to = e.at(rows.pointer, e.mul(kv_start, rows.row)), self.area[f"{name}_pairs"]
        size = e.mul(2, emit_round_to_chunks(e, dim))
        adjacent = b.icmp_signed("==", rows.element, e.index(2))
        rest = b.srem(dim, e.index(self.frame.elements_of_term))
        as_they_lie = b.and_(adjacent, b.icmp_signed("==", rest, e.index(0)))
        with b.if_then(b.not_(as_they_lie), likely=False):
            wide, row = self._adjacent_rows(name, rows, kv_start, count)
            self.call("narrow", wide, row, dim, count, to)
        return b.select(as_they_lie, here, to), b.select(as_they_lie, rows.row, size)

    def end(self) -> None:
        """Write the task's part of dQ."""
        e = self.e
        row = e.add(self.head_row, self.first_row)
        part = e.at(
            self.frame.pointer_field(self.arguments, "query_partials"),
            e.mul(self.split, self.field("partial_bytes")),
            e.mul(row, self.dims["query"], e.real_bytes),
        )

        def write_vector(offset: Value, first: Value) -> None:
            sums = e.at(self.area["query_sums"], offset)
            where = part, first, e.sub(self.rows, 1), self.dims["query"]
            self.call("unpack", sums, self.width, *where)

        self.for_each_vector(write_vector)
