"""Products of all rows of Q with one block of K, and of their weights with one block of V."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qkv.backends.cpu.decode.layout import BLOCK_KV, STRETCH_KV
from qkv.backends.cpu.decode.rows import DecodeFrame
from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.products.dim_lanes import RowProducts

PART_KV = 32
"""Number of keys that all rows are multiplied with before the next keys of the block, if one tile
does not hold all rows."""


class BlockProducts:
    """Writes the functions that multiply rows with blocks, segment by segment."""

    def __init__(self, frame: DecodeFrame, products: RowProducts) -> None:
        self.e, self.frame, self.products = frame.e, frame, products

    def most_keys(self, arguments: Value, name: str) -> Value:
        """The most keys that a function for rows is given at once.

        A block of values has its own sum, pages prefetch one block ahead, and a block of rows whose
        elements are not adjacent is moved.
        """
        e = self.e
        if name == "value" or self.frame.paged[name]:
            return e.index(BLOCK_KV)
        element = self.frame.field(arguments, f"{name}_element")
        item = e.index(storage.ITEM_BYTES[self.frame.dtypes[name]])
        adjacent = e.builder.icmp_signed("==", element, item)
        return e.builder.select(adjacent, e.index(STRETCH_KV), e.index(BLOCK_KV))

    def function(self, name: str, functions: dict[str, Value]) -> Value:
        """A function that multiplies Q with a block of K, or weights with a block of V.

        `(arguments, batch, kv_head, kv_start, count, rows, matrix, weights, moved, forbidden)`.
        """
        e, item = self.e, storage.ITEM_BYTES[self.frame.dtypes[name]]
        arguments, score_row = [POINTER, *[INT64] * 5, *[POINTER] * 3, BIT], self.products.score_row
        with e.function(f"{name}_block", arguments) as (function, args):
            arguments_, batch, kv_head, kv_start, count, rows, *matrices, forbidden = args
            b, (matrix, weights, moved) = e.builder, matrices
            place = self.frame.operand(arguments_, name, batch, kv_head)
            pages = self.frame.pages(arguments_, name, batch)
            dim = self.frame.field(arguments_, "head_dim" if name == "key" else "v_head_dim")
            scattered = b.icmp_signed("!=", place.element, e.index(item))
            block_row = self.frame.block_row_bytes(dim)
            only = b.icmp_signed("==", self.frame.field(arguments_, "kv_len"), e.index(1))
            step, total = e.index(PART_KV), self.frame.bytes_of(arguments_, name)
            most = self.most_keys(arguments_, name)
            for size in self.products.tiles:
                is_one_tile = b.icmp_signed("==", rows, e.index(size))
                step = b.select(is_one_tile, most, step)

            reach = e.least(step, BLOCK_KV)

            def multiply_tiles(
                pointer: Value, row: Value, scores: Value, keys: Value, done: Value
            ) -> None:
                def multiply_part(k: Value, _: list[Value]) -> None:
                    here, to = e.at(pointer, e.mul(k, row)), e.at(scores, e.mul(k, e.real_bytes))
                    count, first = e.least(step, e.sub(keys, k)), e.add(kv_start, done, k)
                    place = [arguments_, batch, kv_head]
                    ahead = self.frame.page_ahead(name, place, here, first, count)

                    def multiply_tile(size: int, i: Value) -> None:
                        stop, p = e.add(i, size), e.at(to, e.mul(i, score_row))
                        prefetch = self.products.prefetch_share(
                            row, e.mul(dim, item), i, stop, rows, reach, total, ahead
                        )
                        if name == "key":
                            q = e.at(matrix, e.mul(i, dim, self.products.query_bytes))
                            place = [here, q, p, row, dim, count]
                            b.call(functions[f"scores {size}"], [*place, *prefetch, only])
                        else:
                            o = e.at(matrix, e.mul(i, block_row))
                            place = [here, p, o, row, block_row, dim, count]
                            b.call(functions[f"values {size}"], [*place, *prefetch])

                    self._for_each_tile(rows, self.products.tiles, multiply_tile)

                e.loop(0, keys, step, [], multiply_part)

            def multiply_selected(pointer: Value, row: Value, scores: Value, keys: Value) -> None:
                def multiply_row(_: int, i: Value) -> None:
                    p, to = e.mul(i, score_row), e.mul(i, block_row)
                    place = [pointer, e.at(scores, p), e.at(matrix, to)]
                    b.call(functions["selected"], [*place, row, dim, keys])

                self._for_each_tile(rows, [1], multiply_row)

            def multiply_checked(*where: Value) -> None:
                pointer, row, _, keys, _ = where
                finite = b.call(functions["all_finite"], [pointer, row, keys, dim])
                e.choose(
                    finite, lambda: multiply_tiles(*where), lambda: multiply_selected(*where[:-1])
                )

            def multiply_segment(pointer: Value, done: Value, keys: Value) -> None:
                with b.if_then(scattered, likely=False):
                    b.call(
                        functions[f"move {name}"],
                        [pointer, place.row, place.element, keys, dim, moved],
                    )
                here = b.select(scattered, moved, pointer)
                row = b.select(scattered, e.mul(dim, item), place.row)
                where = here, row, e.at(weights, e.mul(done, e.real_bytes)), keys, done
                if name == "key" or "all_finite" not in functions:
                    multiply_tiles(*where)
                    return
                e.choose(
                    forbidden, lambda: multiply_checked(*where), lambda: multiply_tiles(*where)
                )

            self.frame.for_each_segment(name, place, pages, kv_start, count, multiply_segment)
        return function

    def _for_each_tile(
        self, rows: Value, tiles: Sequence[int], call: Callable[[int, Value], object]
    ) -> None:
        """`call(size, first_row)` for all rows, in tiles of the sizes in `tiles`."""
        e = self.e
        start = e.index(0)
        for size in tiles:

            def call_tile(i: Value, _: list[Value], size: int = size) -> None:
                call(size, i)

            stop = e.round_down(rows, size)
            e.loop(start, stop, size, [], call_tile)
            start = stop
