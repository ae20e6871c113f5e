"""Blocks of int8 keys and values on matrix tiles, for rows of any number and in any layout.

Tiles need rows of whole chunks of 64 bytes. Rows whose elements are not adjacent, or that lie in
pages of other sizes than multiples of 16, are copied side by side first. Everything else is left to
the functions that multiply without tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.decode.layout import TILE_BLOCK_KV, page_fields
from qkv.backends.cpu.decode.rows import DecodeFrame
from qkv.backends.cpu.emit.emitter import BIT, FLOAT, INT64, POINTER, Value
from qkv.backends.cpu.emit.structured_code import Maker
from qkv.backends.cpu.products.dim_lanes import RowProducts
from qkv.backends.cpu.products.int8_tiles import Int8Tiles
from qkv.backends.cpu.products.layout import ROWS, TILE_BYTES, TILE_ROWS


class TileAreas(NamedTuple):
    """A worker's memory: V, sums of its columns, and of scores; weights, Q, and 16 rows of K.

    Q and weights have the units of each four rows first, then their digits.
    """

    interleaved: Value
    sums: Value
    scores: Value
    weights: Value
    query: Value
    spare: Value


class TileBlocks:
    """Writes the functions of one kernel whose keys or values are int8."""

    def __init__(self, frame: DecodeFrame, rows: RowProducts) -> None:
        self.frame, self.e, self.rows = frame, frame.e, rows
        self.products = Int8Tiles(self.e, rows.score_row)
        self.names = [name for name in ("key", "value") if frame.dtypes[name] == "int8"]

    def functions(self, make: Maker, of_rows: dict[str, Value]) -> dict[str, Value]:
        """The functions of a panel's block, and of packing Q; `of_rows` multiply without tiles."""
        functions = {"copy bytes": make(self.products.copy_function)}
        if "key" in self.names:
            functions["split query"] = make(self.products.split_query_function)
            functions["tile scores"] = make(self.products.scores_function)
            functions["key tiles"] = make(self._keys_function, {**of_rows, **functions})
        if "value" in self.names:
            functions["split weights"] = make(self.products.split_weights_function)
            functions["interleave"] = make(self.products.interleave_function)
            functions["tile values"] = make(self.products.values_function)
            functions["value tiles"] = make(self._values_function, {**of_rows, **functions})
        return functions

    def usable(self, arguments: Value, name: str) -> Value:
        """Whether tiles multiply the keys, or the values, of this call.

        Not an only key: its score is its lse, and rounded once it is summed in float64.
        """
        e, b = self.e, self.e.builder
        if name not in self.names:
            return ir.Constant(BIT, 0)
        dim = self.frame.field(arguments, self._dim(name))
        several = e.below(1, self.frame.field(arguments, "kv_len"))
        whole = b.icmp_signed("==", b.srem(dim, e.index(TILE_BYTES)), e.index(0))
        return b.and_(b.and_(whole, e.below(0, dim)), several)

    def _dim(self, name: str) -> str:
        return "head_dim" if name == "key" else "v_head_dim"

    def areas(self, arguments: Value, start: Value) -> TileAreas:
        """The areas of memory that begins at `start`."""
        e, b = self.e, self.e.builder
        rows, panel, head_dim, v_head_dim = self.frame.words(
            arguments, "rows", "panel", "head_dim", "v_head_dim"
        )
        panels = b.sdiv(e.add(rows, e.sub(panel, 1)), panel)
        sizes = [
            e.mul(v_head_dim, TILE_BLOCK_KV),
            e.mul(v_head_dim, TILE_BYTES),
            e.index(TILE_BYTES * TILE_BLOCK_KV),
            e.index(TILE_BYTES + TILE_ROWS * TILE_BLOCK_KV),
            e.mul(panels, self._tiles_of(panel), self._query_bytes(head_dim)),
        ]
        places = [start]
        for size in sizes:
            places.append(e.at(places[-1], size))
        return TileAreas(*places)

    def _tiles_of(self, rows: Value) -> Value:
        return self.e.builder.sdiv(self.e.add(rows, ROWS - 1), self.e.index(ROWS))

    def _query_bytes(self, head_dim: Value) -> Value:
        """Bytes of the units and the digits of four rows of Q."""
        return self.e.add(self.e.mul(head_dim, TILE_ROWS), TILE_BYTES)

    def _panel_tiles(self, arguments: Value, query: Value, first: Value) -> Value:
        """Where the tiles of the panel lie whose first row is number `first`."""
        e = self.e
        panel, head_dim = self.frame.words(arguments, "panel", "head_dim")
        number = e.builder.sdiv(first, panel)
        return e.at(query, e.mul(number, self._tiles_of(panel), self._query_bytes(head_dim)))

    def split_query(
        self, functions: dict[str, Value], arguments: Value, packed: Value, start: Value
    ) -> None:
        """Split all rows of Q, panel by panel, into the memory for tiles that begins at `start`."""
        e, query = self.e, self.areas(arguments, start).query
        rows, panel, head_dim = self.frame.words(arguments, "rows", "panel", "head_dim")

        def split_panel(first: Value, _: list[Value]) -> None:
            tiles = self._panel_tiles(arguments, query, first)
            count = e.least(panel, e.sub(rows, first))

            def split_tile(i: Value, _: list[Value]) -> None:
                row = e.at(packed, e.mul(e.add(first, i), head_dim, e.real_bytes))
                units = e.at(tiles, e.mul(self._tiles_of(i), self._query_bytes(head_dim)))
                digits = e.at(units, TILE_BYTES)
                place = [row, e.least(ROWS, e.sub(count, i)), head_dim, digits, units]
                e.builder.call(functions["split query"], place)

            e.loop(0, count, ROWS, [], split_tile)

        if "key" in self.names:
            with e.builder.if_then(self.usable(arguments, "key")):
                e.loop(0, rows, panel, [], split_panel)

    def _visit(
        self,
        functions: dict[str, Value],
        name: str,
        where: list[Value],
        moved: Value,
        multiply: Callable[[Value, Value, Value, Value], None],
    ) -> None:
        """`multiply(pointer, row, done, keys)` for segments that begin at multiples of 16 keys.

        `where` are `(arguments, batch, kv_head, kv_start, count)`.
        """
        e, b = self.e, self.e.builder
        arguments, batch, kv_head, kv_start, count = where
        dim = self.frame.field(arguments, self._dim(name))
        place = self.frame.operand(arguments, name, batch, kv_head)
        pages = self.frame.pages(arguments, name, batch)
        adjacent = in_place = b.icmp_signed("==", place.element, e.index(1))
        if self.frame.paged[name]:
            page_size = self.frame.field(arguments, page_fields(name)[1])
            fits = b.icmp_signed("==", b.srem(page_size, e.index(TILE_ROWS)), e.index(0))
            in_place = b.and_(in_place, fits)

        def move(pointer: Value, done: Value, keys: Value) -> None:
            to = e.at(moved, e.mul(done, dim))
            e.choose(
                adjacent,
                lambda: b.call(functions["copy bytes"], [pointer, place.row, keys, dim, to]),
                lambda: b.call(
                    functions[f"move {name}"], [pointer, place.row, place.element, keys, dim, to]
                ),
            )

        def visit(body: Callable[[Value, Value, Value], None]) -> None:
            self.frame.for_each_segment(name, place, pages, kv_start, count, body)

        def multiply_moved() -> None:
            visit(move)
            multiply(moved, dim, e.index(0), count)

        e.choose(
            in_place,
            lambda: visit(lambda pointer, done, keys: multiply(pointer, place.row, done, keys)),
            multiply_moved,
        )

    def _prefetch(
        self, name: str, where: list[Value], segment: list[Value], tile: tuple[Value, Value, Value]
    ) -> tuple[Value, Value]:
        """`RowProducts.prefetch_share` for a `segment` `(pointer, row, done, keys)`.

        `tile` are `(first, stop, rows)`.
        """
        e = self.e
        pointer, row, done, keys = segment
        dim = self.frame.field(where[0], self._dim(name))
        first = e.add(where[3], done)
        ahead = self.frame.page_ahead(name, where[:3], pointer, first, keys)
        total = self.frame.bytes_of(where[0], name)
        return self.rows.prefetch_share(row, dim, *tile, keys, total, ahead)

    def _for_each_row_left(self, units: Value, rows: Value, call: Callable[[Value], None]) -> None:
        """`call(i)` for rows from 0 to `rows` that have no unit."""
        e, b = self.e, self.e.builder

        def check(i: Value, _: list[Value]) -> None:
            unit = e.load(e.at(units, e.mul(i, 4)), FLOAT, 4)
            with b.if_then(b.fcmp_ordered("==", unit, ir.Constant(FLOAT, 0.0)), likely=False):
                call(i)

        e.loop(0, rows, 1, [], check)

    def _keys_function(self, functions: dict[str, Value]) -> Value:
        """A function that gives S of the rows of a panel with a block of K.

        `(arguments, batch, kv_head, kv_start, count, rows, query, scores, moved, start, first)`;
        `start` begins the memory for tiles, `first` is the number of the panel's first row.
        """
        e = self.e
        kinds = [POINTER, *[INT64] * 5, *[POINTER] * 4, INT64]
        with e.function("key_tiles", kinds) as (function, args):
            arguments, *numbers, rows, query, scores, moved, start, first = args
            b, where = e.builder, [arguments, *numbers]
            head_dim = self.frame.field(arguments, "head_dim")
            own, no = self.areas(arguments, start), e.index(0)
            tiles = self._panel_tiles(arguments, own.query, first)

            def multiply(pointer: Value, row: Value, done: Value, keys: Value) -> None:
                def multiply_tile(i: Value, _: list[Value]) -> None:
                    units = e.at(tiles, e.mul(self._tiles_of(i), self._query_bytes(head_dim)))
                    live = e.least(ROWS, e.sub(rows, i))
                    to = e.at(scores, e.mul(i, self.rows.score_row), e.mul(done, e.real_bytes))
                    segment, tile = [pointer, row, done, keys], (i, e.add(i, live), rows)
                    prefetch = self._prefetch("key", where, segment, tile)
                    b.call(
                        functions["tile scores"],
                        [pointer, e.at(units, TILE_BYTES), units, to, row, head_dim, keys, live,
                         own.scores, own.spare, *prefetch],
                    )  # fmt: skip

                    def multiply_row(r: Value) -> None:
                        q = e.at(query, e.mul(e.add(i, r), head_dim, e.real_bytes))
                        out = e.at(to, e.mul(r, self.rows.score_row))
                        place = [pointer, q, out, row, head_dim, keys, no, no]
                        b.call(functions["scores 1"], [*place, ir.Constant(BIT, 0)])

                    self._for_each_row_left(units, live, multiply_row)

                e.loop(0, rows, ROWS, [], multiply_tile)

            self._visit(functions, "key", where, moved, multiply)
        return function

    def _values_function(self, functions: dict[str, Value]) -> Value:
        """A function that adds weights times a block of V to the rows B of a panel.

        Its arguments are those of the function for keys, with B and P instead of Q and S.
        """
        e = self.e
        kinds = [POINTER, *[INT64] * 5, *[POINTER] * 4, INT64]
        with e.function("value_tiles", kinds) as (function, args):
            arguments, *numbers, rows, block, weights, moved, start, _ = args
            b, where, count = e.builder, [arguments, *numbers], numbers[-1]
            dim = self.frame.field(arguments, "v_head_dim")
            block_row = e.mul(dim, e.real_bytes)
            own, no = self.areas(arguments, start), e.index(0)
            units, digits = own.weights, e.at(own.weights, TILE_BYTES)

            def interleave(pointer: Value, row: Value, done: Value, keys: Value) -> None:
                segment = [pointer, row, done, keys]
                prefetch = self._prefetch("value", where, segment, (no, rows, rows))
                b.call(
                    functions["interleave"],
                    [pointer, row, done, keys, dim, *prefetch, own.interleaved],
                )

            self._visit(functions, "value", where, moved, interleave)

            def multiply_tile(i: Value, _: list[Value]) -> None:
                p = e.at(weights, e.mul(i, self.rows.score_row))
                live, to = e.least(ROWS, e.sub(rows, i)), e.at(block, e.mul(i, block_row))
                b.call(functions["split weights"], [p, count, live, digits, units])
                b.call(
                    functions["tile values"],
                    [digits, units, own.interleaved, to, block_row, dim, count, live, own.sums],
                )

                def multiply_row(r: Value) -> None:
                    row_p, o = e.at(p, e.mul(r, self.rows.score_row)), e.mul(r, block_row)

                    def multiply(pointer: Value, row: Value, done: Value, keys: Value) -> None:
                        here = e.at(row_p, e.mul(done, e.real_bytes))
                        place = [pointer, here, e.at(to, o), row, block_row, dim, keys, no, no]
                        b.call(functions["values 1"], place)

                    self._visit(functions, "value", where, moved, multiply)

                self._for_each_row_left(units, live, multiply_row)

            e.loop(0, rows, ROWS, [], multiply_tile)
        return function
