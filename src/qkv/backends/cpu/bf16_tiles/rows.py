"""K and V of a block of keys as tiles: K by rows, V transposed."""

from __future__ import annotations

from llvmlite import ir

from qkv.backends.cpu.bf16_pairs.rows import Bf16Rows
from qkv.backends.cpu.bf16_tiles.layout import GROUP, Sizes
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.products.bfloat16 import load_chunk, present_elements
from qkv.backends.cpu.products.layout import CHUNK, TILE_BYTES, TILE_ROWS, TILE_SIZE


class TileRows:
    """Emits the functions of one kernel that lay out K and V as tiles."""

    def __init__(self, rows: Bf16Rows, sizes: Sizes) -> None:
        self.e, self.rows, self.sizes = rows.e, rows, sizes

    def pack_keys_function(self) -> Value:
        """A function `(rows, row, count, dim, to)`: K as tiles of 16 keys and 32 elements."""
        e, chunks = self.e, self.sizes.chunks
        with e.function("pack_keys", [POINTER, *[INT64] * 3, POINTER]) as (function, args):
            rows, row, count, dim, target = args
            b = e.builder
            present = [present_elements(e, e.sub(dim, c * CHUNK)) for c in range(chunks)]

            def copy_key(k: Value, _: list[Value]) -> None:
                exists = e.below(k, count)
                band, inside = b.sdiv(k, e.index(TILE_ROWS)), b.srem(k, e.index(TILE_ROWS))
                to = e.at(target, e.mul(band, chunks * TILE_SIZE), e.mul(inside, TILE_BYTES))
                start = e.at(rows, e.mul(k, row))
                for c, mask in enumerate(present):
                    place = b.select(exists, e.at(start, 2 * c * CHUNK), e.zeros_address())
                    e.store_vector(load_chunk(e, place, mask), e.at(to, c * TILE_SIZE))

            whole = e.round_down(e.add(count, GROUP - 1), GROUP)
            e.loop(0, whole, 1, [], copy_key)
        return function

    def transpose_values_function(self) -> Value:
        """A function `(rows, row, count, dim, to)`: V as tiles of 16 elements and 32 keys."""
        e, rows_, sizes = self.e, self.rows, self.sizes
        kinds = [POINTER, *[INT64] * 3, POINTER]
        with e.function("transpose_values", kinds) as (function, args):
            rows, row, count, dim, target = args

            def transpose_group(k: Value, _: list[Value]) -> None:
                group = e.at(target, e.mul(e.builder.sdiv(k, e.index(GROUP)), sizes.value_bytes))

                def transpose_chunk(d: Value, _: list[Value]) -> None:
                    to = e.at(group, e.mul(d, TILE_BYTES))

                    def store(i: int, pairs: Value) -> None:
                        e.store_vector(pairs, e.at(to, i * TILE_BYTES))

                    present = present_elements(e, e.sub(dim, d))
                    start = e.at(rows, e.mul(d, 2))
                    rows_.transpose_chunk(start, row, k, count, present, store)

                e.loop(0, dim, CHUNK, [], transpose_chunk)

            e.loop(0, count, GROUP, [], transpose_group)
        return function

    def sift_function(self) -> Value:
        """A function `(values, count)`: whether any value of `count` keys is not finite.

        Values that are not finite become 0.
        """
        e, rows = self.e, self.rows
        with e.function("sift", [POINTER, INT64], BIT) as (function, args):
            values, count = args
            none = ir.Constant(ir.IntType(CHUNK), 0)
            groups = e.builder.sdiv(e.add(count, GROUP - 1), e.index(GROUP))
            (marks,) = e.loop(
                0, e.mul(groups, self.sizes.value_bytes), TILE_BYTES, [none],
                lambda i, marks: [rows.sift_halves(e.at(values, i), marks[0])],
            )  # fmt: skip
            e.builder.ret(e.builder.icmp_unsigned("!=", marks, none))
        return function
