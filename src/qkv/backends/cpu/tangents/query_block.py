"""The work of a task for one block of queries: rows in, two passes over its keys, tangents out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.backward.block_of_queries import BlockCall, BlockOfQueries
from qkv.backends.cpu.emit.emitter import BIT, Value
from qkv.backends.cpu.emit.frame import RowView
from qkv.backends.cpu.forward.layout import RUN
from qkv.backends.cpu.tangents.frame import TangentFrame
from qkv.backends.cpu.tangents.layout import BLOCK_KV, TASK
from qkv.problem.language.expressions import TRUE


class _KeyBlock(NamedTuple):
    """A block of keys whose weights are known."""

    kv_start: Value
    count: Value
    areas: dict[str, Value]


class QueryBlockPass(BlockOfQueries):
    """Emits what is computed for one block of queries of one head."""

    frame: TangentFrame

    def __init__(
        self, frame: TangentFrame, vectors: int, functions: dict[str, Value], call: BlockCall
    ) -> None:
        super().__init__(frame, vectors, functions, call)
        *_, self.split, _ = frame.record(call.task, TASK)
        self.scale = frame.real_field(call.arguments, "scale")
        self.kept_blocks = self.field("kept_blocks")
        self.finite: Value = ir.Constant(BIT, 1)
        """Whether all rows of the block are."""

    def emit(self) -> None:
        """All code of the block, from packing its queries to writing their tangents."""
        self._begin()
        self._for_each_key_block(self._sum_block)
        self.for_each_vector(self._end_rows)
        self._for_each_key_block(self._add_block)
        self._end()

    def _rows_of(self, name: str, first_row: Value, dim: Value) -> Value:
        """Where a row of a dense matrix begins."""
        start = self.frame.pointer_field(self.arguments, name)
        return self.e.at(start, self.e.mul(first_row, dim, self.e.real_bytes))

    # Rows in and out

    def _begin(self) -> None:
        e, frame = self.e, self.frame
        of_queries = {"query": "query", "query_dot": "query"}
        if frame.backward:
            of_queries["grad_out"] = "value"

        def pack_vector(offset: Value, first: Value) -> None:
            for name, dim in of_queries.items():
                rows = frame.operand(self.arguments, name, self.batch, self.head)
                self._pack(rows, self.dims[dim], first, e.at(self.area[name], offset))
            reals = e.at(self.area["reals"], offset)
            if frame.backward:
                place = frame.real_place(reals, self.width, "grad_lse")
                start = self._rows_of("grad_lse", self.head_row, e.index(1))
                column = RowView(start, e.index(e.real_bytes), e.index(e.real_bytes))
                self._pack(column, e.index(1), first, place)
            sums = e.at(self.area["sums"], e.mul(offset, 8 // e.real_bytes))
            self.call("begin_rows", self.arguments, sums, reals, self.width, self.head)

        self.for_each_vector(pack_vector)
        e.clear(self.area["out_sums"], 0, e.mul(self.dims["value"], self.width))
        if frame.backward:
            e.clear(self.area["query_sums"], 0, e.mul(self.dims["query"], self.width))
            for (name, dim), rows in zip(
                of_queries.items(), ("query_rows", "query_dot_rows", "grad_rows"), strict=True
            ):
                columns = self._columns(dim)
                end = e.mul(columns, e.lanes, self.width)
                e.clear(self.area[name], e.mul(self.dims[dim], self.width), end)
                shape = self.width, self.dims[dim], e.index(self.vectors * e.lanes)
                finite = self.call("all_finite", self.area[name], *shape)
                self.finite = e.builder.and_(self.finite, finite)
                self.call("transpose", self.area[name], self.area[rows], columns, self.width)

    def _columns(self, dim: str) -> Value:
        """Vectors of a row."""
        e = self.e
        return e.builder.sdiv(e.add(self.dims[dim], e.lanes - 1), e.index(e.lanes))

    def _pack(self, rows: RowView, dim: Value, first: Value, to: Value) -> None:
        where = self.e.add(self.first_row, first), self.last, dim
        self.call("pack", *rows, *where, to, self.width)

    def _end_rows(self, offset: Value, first: Value) -> None:
        e = self.e
        sums = e.at(self.area["sums"], e.mul(offset, 8 // e.real_bytes))
        reals = e.at(self.area["reals"], offset)
        row, left = e.add(self.head_row, self.first_row, first), e.sub(self.rows, first)
        self.call("end_rows", self.arguments, sums, reals, self.width, self.head, row, left)

    def _end(self) -> None:
        e = self.e
        results = [("out_sums", "out_dot", "value")]
        if self.frame.backward:
            results.append(("query_sums", "d_query_dot", "query"))

        def write_vector(offset: Value, first: Value) -> None:
            for area, name, dim in results:
                row = e.add(self.head_row, self.first_row)
                out = self._rows_of(name, row, self.dims[dim])
                where = out, first, e.sub(self.rows, 1), self.dims[dim]
                self.call("unpack", e.at(self.area[area], offset), self.width, *where)

        self.for_each_vector(write_vector)

    # Blocks of keys

    def _for_each_key_block(self, body: Callable[[Value, Value, Value, Value], None]) -> None:
        """Emit `body(kv_start, count, masked, n)` for every block of keys, the n-th of all."""
        e, frame = self.e, self.frame
        runs = frame.pointer_field(self.arguments, "runs")

        def for_run(r: Value, before: list[Value]) -> list[Value]:
            first, end, kind = frame.record(runs, RUN, r)
            masked = e.builder.icmp_signed("!=", kind, e.index(0))

            def for_block(k: Value, number: list[Value]) -> list[Value]:
                body(k, e.least(BLOCK_KV, e.sub(end, k)), masked, number[0])
                return [e.add(number[0], 1)]

            return e.loop(first, end, BLOCK_KV, before, for_block)

        e.loop(self.first_run, self.last_run, 1, [e.index(0)], for_run)

    def _areas_of(self, number: Value) -> dict[str, Value]:
        """The areas of pairs of a block of keys; blocks that are not kept share the last ones."""
        e = self.e
        offset = e.mul(e.least(number, self.kept_blocks), self.width, BLOCK_KV)
        places = self.frame.pair_areas
        return {name: e.at(self.area[place], offset) for name, place in places.items()}

    def _key_rows(self, name: str, kv_start: Value) -> tuple[Value, Value]:
        """Rows of keys or values from `kv_start` on, and the bytes from one to the next."""
        rows = self.frame.operand(self.arguments, name, self.batch, self.kv_head)
        return self.e.at(rows.pointer, self.e.mul(kv_start, rows.row)), rows.row

    def _compute_scores(
        self, kv_start: Value, count: Value, masked: Value, areas: dict[str, Value]
    ) -> None:
        """Scores, dP and their tangents of one block of keys."""
        e, frame = self.e, self.frame
        one, zero = ir.Constant(e.real, 1.0), ir.Constant(BIT, 0)

        def multiply(rows: str, packed: str, to: str, scale: Value, adds: Value = zero) -> None:
            pointer, row = self._key_rows(rows, kv_start)
            dim = self.dims[rows.removesuffix("_dot")]
            where = pointer, self.area[packed], areas[to], row, dim, count, scale, adds
            self.call(f"multiply {self.vectors}", *where)

        multiply("key", "query", "products", self.scale)
        multiply("key", "query_dot", "products_dot", self.scale)
        multiply("key_dot", "query", "products_dot", self.scale, ir.Constant(BIT, 1))
        self._finish_scores(kv_start, count, masked, areas)
        if frame.backward:
            multiply("value", "grad_out", "d_weights", one)
            multiply("value_dot", "grad_out", "d_weights_dot", one)
            if frame.spec.dropout:
                self._call_by_vector("drop", kv_start, count, areas)

    def _finish_scores(
        self, kv_start: Value, count: Value, masked: Value, areas: dict[str, Value]
    ) -> None:
        def finish(name: str) -> None:
            self._call_by_vector(name, kv_start, count, areas)

        has_full = "full" in self.functions
        if self.frame.mask == TRUE:
            if has_full:
                finish("full")
        elif has_full:
            self.e.choose(masked, lambda: finish("partial"), lambda: finish("full"))
        else:
            with self.e.builder.if_then(masked):
                finish("partial")

    def _call_by_vector(
        self, name: str, kv_start: Value, count: Value, areas: dict[str, Value]
    ) -> None:
        e = self.e

        def call_for_vector(offset: Value, first: Value) -> None:
            # A vector beyond the last row repeats that row, and its results are not used.
            held = [e.at(area, offset) for area in areas.values()]
            sums = e.at(self.area["sums"], e.mul(offset, 8 // e.real_bytes))
            where = self.batch, self.head, e.add(self.first_row, first), e.sub(self.rows, first)
            reals = e.at(self.area["reals"], offset)
            self.call(
                name,
                self.arguments,
                self.task,
                *held,
                sums,
                reals,
                self.width,
                count,
                *where,
                kv_start,
            )

        self.for_each_vector(call_for_vector)

    def _sum_block(self, kv_start: Value, count: Value, masked: Value, number: Value) -> None:
        """The first pass: scores, and the sums of rows."""
        areas = self._areas_of(number)
        self._compute_scores(kv_start, count, masked, areas)
        self._call_by_vector("add_rows", kv_start, count, areas)

    def _add_block(self, kv_start: Value, count: Value, masked: Value, number: Value) -> None:
        """The second pass: weights, and what they add to the tangents."""
        e, areas = self.e, self._areas_of(number)
        is_lost = e.builder.icmp_signed(">=", number, self.kept_blocks)
        with e.builder.if_then(is_lost):
            self._compute_scores(kv_start, count, masked, areas)
        self._call_by_vector("gradients", kv_start, count, areas)
        held = _KeyBlock(kv_start, count, areas)
        self._add_to_queries(held, "value", "scores_dot", "scores", "out_sums")
        if not self.frame.backward:
            return
        self._add_to_queries(held, "key", "d_weights_dot", "d_weights", "query_sums")
        self._add_to_keys(held, "key", "d_weights_dot", "query_rows")
        self._add_to_keys(held, "key", "d_weights", "query_dot_rows")
        self._add_to_keys(held, "value", "scores_dot", "grad_rows")

    def _add_to_queries(
        self, held: _KeyBlock, rows: str, moved: str, weights: str, to: str
    ) -> None:
        """Add rows of keys times what moved, and their tangents times the weights."""
        for name, left in ((rows, moved), (f"{rows}_dot", weights)):
            pointer, row = self._key_rows(name, held.kv_start)
            dim, marks = self.dims[rows], held.areas["scores"]
            where = pointer, held.areas[left], marks, self.area[to], row, dim, held.count

            def add(where: tuple[Value, ...] = where) -> None:
                self.call(f"query_sums {self.vectors}", *where)

            def add_selected(where: tuple[Value, ...] = where) -> None:
                self.call(f"selected_query_sums {self.vectors}", *where)

            finite = self.call("all_finite", pointer, row, held.count, dim)
            self.e.choose(finite, add, add_selected)

    def _add_to_keys(self, held: _KeyBlock, of: str, left: str, rows: str) -> None:
        """Add rows of queries to the sums of dK or dV."""
        e = self.e
        row = self.field(f"{of}_sum_row")
        sums = e.at(
            self.frame.pointer_field(self.arguments, f"{of}_sums"),
            e.mul(self.split, self.field(f"{of}_part")),
            e.mul(e.add(self.kv_row, held.kv_start), row),
        )
        columns = self._columns("query" if of == "key" else "value")
        factors, where = (held.areas[left], self.area[rows]), (sums, row, columns, held.count)

        def add() -> None:
            self.call("key_sums", *factors, *where, e.index(0), self.rows, self.width)

        def add_selected() -> None:
            marks = held.areas["scores"]
            self.call("selected_key_sums", *factors, marks, *where, self.rows, self.width)

        e.choose(self.finite, add, add_selected)
