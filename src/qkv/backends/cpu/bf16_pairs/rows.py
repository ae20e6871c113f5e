"""Rows of bfloat16 as pairs: loaded, copied, packed, transposed, and what is not finite in them."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import BIT, FLOAT, INT16, INT32, INT64, POINTER, Value
from qkv.backends.cpu.emit.forbidden_pairs import forbidden_bits, is_allowed
from qkv.backends.cpu.emit.frame import RowView, rows_from
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.products.bfloat16 import (
    HALVES,
    emit_round_to_chunks,
    load_chunk,
    present_elements,
    split_pairs,
)
from qkv.backends.cpu.products.layout import CHUNK
from qkv.backends.cpu.products.packed_pairs import packed_pairs
from qkv.backends.cpu.products.query_lanes import vectors_at


class Bf16Rows:
    """Emits the functions that read rows of bfloat16, of a kernel whose packed rows have so many
    vectors of queries."""

    def __init__(self, frame: ForwardFrame, vectors: int) -> None:
        self.frame, self.e = frame, frame.e
        self.vectors = vectors
        self.packed = packed_pairs(self.e, frame.shape, vectors)
        self.width = self.vectors * self.e.vector_bytes

    def copy_function(self) -> Value:
        """A function `(from, row, element, count, dim, to)` that copies rows side by side.

        Rows, and elements of rows, are padded with 0 to whole chunks.
        """
        e = self.e
        with e.function("copy", [POINTER, *[INT64] * 4, POINTER]) as (function, args):
            source, row, element, count, dim, target = args
            b = e.builder
            width = e.mul(2, emit_round_to_chunks(e, dim))
            adjacent = b.icmp_signed("==", element, e.index(2))

            def copy_row(k: Value, _: list[Value]) -> None:
                start, end = e.at(source, e.mul(k, row)), e.at(target, e.mul(k, width))
                exists = e.below(k, count)

                def copy_chunk(d: Value, _: list[Value]) -> None:
                    place = b.select(exists, e.at(start, e.mul(d, 2)), e.zeros_address())
                    present = present_elements(e, b.select(adjacent, e.sub(dim, d), e.index(0)))
                    e.store_vector(load_chunk(e, place, present), e.at(end, e.mul(d, 2)))

                def copy_element(d: Value, _: list[Value]) -> None:
                    x = e.load(e.at(start, e.mul(d, element)), INT16, 2)
                    e.store(x, e.at(end, e.mul(d, 2)), 2)

                e.loop(0, dim, CHUNK, [], copy_chunk)
                scattered = b.and_(exists, b.not_(adjacent))
                e.loop(0, b.select(scattered, dim, e.index(0)), 1, [], copy_element)

            e.loop(0, emit_round_to_chunks(e, count), 1, [], copy_row)
        return function

    def pack_function(self, functions: dict[str, Value]) -> Value:
        """One vector of queries as pairs; lanes beyond the last row repeat it."""
        e = self.e
        arguments = [POINTER, POINTER, POINTER, POINTER, INT64]
        with e.function("pack", arguments) as (function, args):
            arguments_, query, packed, copy, first_row = args
            b = e.builder
            row, element, head_dim, rows = self.frame.words(
                arguments_, "query_row", "query_element", "head_dim", "rows"
            )
            last = e.least(e.lanes - 1, e.sub(e.sub(rows, first_row), 1))
            here = rows_from(e, RowView(query, row, element), first_row)
            start, row = self.with_adjacent_elements(
                functions, here, e.add(last, 1), head_dim, copy
            )
            places = [e.at(start, e.mul(e.least(i, last), row)) for i in range(e.lanes)]
            negative = b.fcmp_ordered(
                "<", self.frame.real_field(arguments_, "sign"), ir.Constant(FLOAT, 0)
            )
            flip = e.splat(b.select(negative, *(ir.Constant(INT32, x) for x in (0x80008000, 0))))

            def pack_chunk(d: Value, _: list[Value]) -> None:
                present = present_elements(e, e.sub(head_dim, d))
                loaded = [load_chunk(e, e.at(place, e.mul(d, 2)), present) for place in places]
                start = e.at(packed, e.mul(d, self.width // 2))
                for p, pairs in enumerate(self.packed.packed_rows(e.transpose(loaded))):
                    signed = e.as_floats(b.xor(e.as_bits(pairs), flip))
                    e.store_vector(signed, e.at(start, p * self.width))

            e.loop(0, head_dim, CHUNK, [], pack_chunk)
        return function

    def transpose_chunk(
        self,
        rows: Value,
        row: Value,
        k: Value,
        count: Value,
        present: Value,
        store: Callable[[int, Value], None],
    ) -> None:
        """`store(i, pairs)`: element i of the 32 keys from k on, as 16 pairs of neighbouring keys.

        `rows` is the address of 32 elements of key 0, of which some are `present`; keys from
        `count` on count as 0.
        """
        e, b = self.e, self.e.builder
        low, high, sixteen = e.const_bits(0xFFFF), e.const_bits(-(2**16)), e.const_bits(16)

        def load_every_other(first: int) -> list[Value]:
            """Pairs of elements of every other key from key `first` on, transposed."""
            loaded = []
            for i in range(first, CHUNK, 2):
                key = e.add(k, i)
                place = e.at(rows, e.mul(key, row))
                place = b.select(e.below(key, count), place, e.zeros_address())
                loaded.append(load_chunk(e, place, present))
            return [e.as_bits(vector) for vector in e.transpose(loaded)]

        evens, odds = load_every_other(0), load_every_other(1)
        for p, (even, odd) in enumerate(zip(evens, odds, strict=True)):
            below = b.or_(b.and_(even, low), b.shl(odd, sixteen))
            above = b.or_(b.lshr(even, sixteen), b.and_(odd, high))
            for half, pairs in enumerate((below, above)):
                store(2 * p + half, e.as_floats(pairs))

    def sift_halves(self, place: Value, marks: Value) -> Value:
        """32 elements at `place`: those that are not finite become 0, and are marked in `marks`."""
        e, b = self.e, self.e.builder
        exponent, zeros = ir.Constant(HALVES, [0x7F80] * CHUNK), ir.Constant(HALVES, None)
        x = e.load(place, HALVES, e.vector_bytes)
        is_not_finite = b.icmp_unsigned("==", b.and_(x, exponent), exponent)
        e.store(b.select(is_not_finite, zeros, x), place, e.vector_bytes)
        return b.or_(marks, b.bitcast(is_not_finite, ir.IntType(CHUNK)))

    def with_adjacent_elements(
        self,
        functions: dict[str, Value],
        rows: RowView,
        count: Value,
        dim: Value,
        copy: Value,
        *,
        whole_chunks: bool = False,
    ) -> tuple[Value, Value]:
        """Rows with adjacent elements, as they lie or copied; copied too for `whole_chunks`."""
        e, b = self.e, self.e.builder
        here, row, element = rows
        is_copied = b.icmp_signed("!=", element, e.index(2))
        if whole_chunks:
            for size in (count, dim):
                has_rest = b.icmp_signed("!=", emit_round_to_chunks(e, size), size)
                is_copied = b.or_(is_copied, has_rest)
        with b.if_then(is_copied, likely=False):
            b.call(functions["copy"], [here, row, element, count, dim, copy])
        start = b.select(is_copied, copy, here)
        return start, b.select(is_copied, e.mul(2, emit_round_to_chunks(e, dim)), row)

    def add_non_finite_function(self) -> Value:
        """A function `(rows, row, weights, out, v_head_dim, count)` that adds what `sift` left out.

        A forbidden pair adds nothing: 0 * inf would be NaN.
        """
        e = self.e
        arguments = [POINTER, INT64, POINTER, POINTER, INT64, INT64]
        with e.function("add_non_finite", arguments) as (function, args):
            rows, row, weights, out, v_head_dim, count = args
            b = e.builder
            forbidden = forbidden_bits(e)

            def add_key(k: Value, _: list[Value]) -> None:
                is_second = b.trunc(b.and_(k, e.index(1)), BIT)
                pairs = self.packed.pairs_at(weights, b.ashr(k, e.index(1)))
                halves = [split_pairs(e, pair) for pair in pairs]
                weights_of_key = [b.select(is_second, second, first) for first, second in halves]

                def add_element(d: Value, _: list[Value]) -> None:
                    x = storage.load(e, e.at(rows, e.mul(k, row), e.mul(d, 2)), "bfloat16")
                    difference = b.fsub(x, x)
                    with b.if_then(e.is_nan(difference), likely=False):
                        place = e.at(out, e.mul(d, self.width))
                        total = vectors_at(e, place, self.vectors)
                        for j, (weight, old) in enumerate(zip(weights_of_key, total, strict=True)):
                            allowed = is_allowed(e, weight, forbidden)
                            new = b.select(allowed, e.fma(e.splat(x), weight, old), old)
                            e.store_vector(new, e.at(place, j * e.vector_bytes))

                e.loop(0, v_head_dim, 1, [], add_element)

            e.loop(0, count, 1, [], add_key)
        return function
