"""Rows of float32 and float16 split into bfloat16 terms, in the layout that tile products read.

A float32 has 24 significant bits and a bfloat16 has 8, so every float32 is a sum of three bfloat16
numbers, and every float16 is a sum of two:

    x = x1 + x2 + x3,   |x2| <= 2^-8 |x1|,   |x3| <= 2^-9 |x2|
    x . y = x1 . y1 + (x1 . y2 + x2 . y1) + (x1 . y3 + x2 . y2 + x3 . y1) + rest

The rest is at most 2^-24 |x| . |y|, which is as much as rounding a product to float32 changes it,
and it may have either sign. For float16 nothing is left out. Operands are rounded to terms. The
numbers that are computed between two products, of which there are many more, are truncated instead:
that takes fewer instructions and may make the rest three times as large.

Tiles treat subnormal numbers as 0, and numbers that are huge or not finite cannot be split. Such
elements are found while rows are split, and are left to `non_finite`.

Sources: Dekker, "A floating-point technique for extending the available precision" (1971); Henry,
Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations" (2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.emit.frame import RowView
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products import matrix_unit
from qkv.backends.cpu.products.bfloat16 import emit_round_to_chunks, join_pairs, round_to_bfloat16
from qkv.backends.cpu.products.layout import CHUNK, TILE_BYTES, TILE_ROWS, TILE_SIZE
from qkv.backends.cpu.products.query_lanes import store_vectors, vectors_at
from qkv.backends.cpu.split_bf16.layout import FLOAT_BYTES

_PRODUCTS: dict[int, matrix_unit.Products] = {
    1: ((0, 0),),
    2: ((0, 1), (1, 1), (1, 0), (0, 0)),
    3: ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)),
}
"""The products that are computed, by number of terms. Neighbours share a term. The largest product
comes last, so that the small ones are added up first."""
_WEIGHT_PRODUCTS: dict[int, matrix_unit.Products] = {**_PRODUCTS, 2: ((0, 1), (0, 0), (1, 0))}
"""The products where the left factor is a weight. What is left out is 2^-16 of the weight, and
float16 keeps 2^-11 of it."""

_LOWEST, _HIGHEST = (int(np.float32(x).view(np.int32)) for x in (2.0**-100, 2.0**60))
"""Bits of the smallest and of the largest magnitude that tiles multiply exactly."""
_MAGNITUDE = 2**31 - 1
_UPPER = -(2**16)
"""The bits of a float32 that a bfloat16 has too."""


class TermSplitter:
    """Emits what splits rows of one kernel.

    `block_kv` keys are a row of tiles of columns, or, if their number is given, all tiles of
    columns of 32 keys lie together.
    """

    def __init__(self, e: Emitter, shape: TileShape, block_kv: int, columns: int = 0) -> None:
        self.e = e
        self.terms, self.vectors = shape.terms, shape.vectors
        self.width = self.vectors * e.vector_bytes
        self.chunk_bytes = self.terms * TILE_SIZE
        """Bytes of 16 rows and 32 columns of a left factor."""
        self.column_band = self.chunk_bytes if columns else block_kv // CHUNK * self.chunk_bytes
        """Bytes from 16 columns to the next 16."""
        self.row_band = columns * self.chunk_bytes if columns else self.chunk_bytes
        """Bytes of columns from 32 rows to the next 32."""
        self.term_bytes = TILE_ROWS * self.width
        """Bytes from one term of 16 packed pairs to the next term."""
        self.panel_bytes = self.terms * self.term_bytes
        """Bytes of 32 transposed rows and as many columns."""

    def products(self, *, of_weights: bool = False) -> matrix_unit.Products:
        """Which terms are multiplied, in order."""
        return (_WEIGHT_PRODUCTS if of_weights else _PRODUCTS)[self.terms]

    # Terms

    def rounded_terms(self, x: Value) -> list[Value]:
        """The terms of a vector of float32: bits whose lower half is 0."""
        e, b = self.e, self.e.builder
        terms = []
        for n in range(self.terms):
            bits = e.as_bits(x)
            if n < self.terms - 1:
                bits = b.and_(b.add(bits, e.const_bits(0x8000)), e.const_bits(_UPPER))
                x = b.fsub(x, e.as_floats(bits))
            terms.append(bits)
        return terms

    def left_out(self, x: Value) -> Value:
        """What the terms of a vector lack as `split_and_store` has them, the last one rounded."""
        e = self.e
        last = e.as_floats(self.rounded_terms(x)[-1])
        rounded = storage.widen(e, storage.narrow(e, last, "bfloat16"), "bfloat16")
        return e.builder.fsub(last, rounded)

    def term_pair(self, first: Value, second: Value) -> Value:
        """Two terms of each lane side by side."""
        e, b = self.e, self.e.builder
        return e.as_floats(
            b.or_(e.settled(b.lshr(first, e.const_bits(16))), b.and_(second, e.const_bits(_UPPER)))
        )

    def truncated_terms(self, both: Sequence[Value]) -> list[list[Value]]:
        """The terms of vectors as bits: each has the upper bits of what the earlier terms left.

        Their lower halves are not cleared.
        """
        e, b = self.e, self.e.builder
        terms = []
        for n in range(self.terms):
            bits = [e.as_bits(x) for x in both]
            terms.append(bits)
            if n < self.terms - 1:
                upper = [e.as_floats(b.and_(x, e.const_bits(_UPPER))) for x in bits]
                both = [b.fsub(x, term) for x, term in zip(both, upper, strict=True)]
        return terms

    def packed_row(self, packed: Value, element: Value) -> Value:
        """Where the pair of an even element and the next one is in its first term."""
        e = self.e
        chunk = e.round_down(element, CHUNK)
        inside = e.mul(e.sub(element, chunk), self.width // 2)
        return e.at(packed, e.mul(chunk, self.terms * self.width // 2), inside)

    def store_pair(self, first: Value, second: Value, place: Value) -> None:
        """Store numbers of two keys, truncated to terms, as a pair in each lane."""
        self.store_term_pairs(self.truncated_terms([first, second]), place)

    def store_term_pairs(self, terms: Sequence[Sequence[Value]], place: Value) -> None:
        """Store two vectors as pairs for each term; a single term is rounded."""
        if self.terms == 1:
            pair = join_pairs(self.e, *map(self.e.as_floats, terms[0]))
            self.e.store_vector(pair, place)
            return
        for n, (first, second) in enumerate(terms):
            pair = self.term_pair(first, second)
            self.e.store_vector(pair, self.e.at(place, n * self.term_bytes))

    def clear_second(self, packed: Value, element: Value) -> None:
        """Set the second element of a pair to 0."""
        e, b = self.e, self.e.builder
        place = self.packed_row(packed, element)
        for n in range(self.terms):
            here = e.at(place, n * self.term_bytes)
            pairs = map(e.as_bits, vectors_at(e, here, self.vectors))
            store_vectors(e, here, [e.as_floats(b.and_(x, e.const_bits(0xFFFF))) for x in pairs])

    def clear_pairs(self, packed: Value, first: Value, stop: Value) -> None:
        """Set the pairs that fill the last chunk to 0."""
        e = self.e

        def clear_pair(p: Value, _: list[Value]) -> None:
            place = self.packed_row(packed, e.mul(p, 2))
            for n in range(self.terms):
                store_vectors(e, e.at(place, n * self.term_bytes), [e.const(0.0)] * self.vectors)

        e.loop(first, stop, 1, [], clear_pair)

    def split_and_store(self, halves: Sequence[Value], place: Value) -> None:
        """Store the rounded terms of 32 elements, each as a row of its tile."""
        e = self.e
        for n, (first, second) in enumerate(zip(*map(self.rounded_terms, halves), strict=True)):
            row = round_to_bfloat16(e, first, second)
            e.store(row, e.at(place, n * TILE_SIZE), e.vector_bytes)

    def store_terms(self, terms: Sequence[Sequence[Value]], place: Value) -> None:
        """Store truncated terms of two vectors, each as a row of its tile; the last is rounded."""
        e, b = self.e, self.e.builder
        for n, both in enumerate(terms):
            if n < self.terms - 1:
                both = [b.and_(bits, e.const_bits(_UPPER)) for bits in both]
            row = round_to_bfloat16(e, *both)
            e.store(row, e.at(place, n * TILE_SIZE), e.vector_bytes)

    # Rows

    def load_elements(
        self, start: Value, d: Value, dim: Value, exists: Value | None = None
    ) -> Value:
        """16 elements of a row of float32; 0 for elements from `dim` on and for missing rows."""
        e, b = self.e, self.e.builder
        place = e.at(start, e.mul(d, FLOAT_BYTES))
        left = e.sub(dim, d)
        if exists is not None:
            place = b.select(exists, place, e.zeros_address())
            left = b.select(exists, left, e.index(0))
        return storage.load(e, place, "float32", e.lanes, e.first_lanes(left))

    def _load_vectors(
        self, whole: Value, places: Sequence[Value], partly: Callable[[], list[Value]]
    ) -> list[Value]:
        """16 elements from each place if they are there as a `whole`, else what `partly` gives."""
        e, b = self.e, self.e.builder
        with b.if_else(whole) as (then, otherwise):
            with then:
                loaded = [e.load_vector(place, aligned=False) for place in places]
                after_loading = b.block
            with otherwise:
                others = partly()
                after_others = b.block
        vectors = []
        for full, other in zip(loaded, others, strict=True):
            either = b.phi(e.vector)
            either.add_incoming(full, after_loading)
            either.add_incoming(other, after_others)
            vectors.append(either)
        return vectors

    def split_rows(self) -> Value:
        """A function `(from, row, count, dim, to, non_finite_rows)`: rows of K as terms, as tiles.

        `non_finite_rows` gets the number of keys that cannot be split, and then which they are.
        """
        e = self.e
        with e.function("split_rows", [POINTER, *[INT64] * 3, *[POINTER] * 2]) as (function, args):
            source, row, count, dim, target, non_finite_rows = args
            b, bits = e.builder, ir.IntType(e.lanes)
            wide, band = emit_round_to_chunks(e, dim), self.band_bytes(dim)

            def split_row(k: Value, carried: list[Value]) -> list[Value]:
                start, exists = e.at(source, e.mul(k, row)), e.below(k, count)
                inside = e.mul(b.and_(k, e.index(TILE_ROWS - 1)), TILE_BYTES)
                tiles = e.at(target, e.mul(b.sdiv(k, e.index(TILE_ROWS)), band), inside)

                def split_chunk(d: Value, seen: list[Value]) -> list[Value]:
                    begins = [e.add(d, n) for n in (0, e.lanes)]
                    halves = self._load_vectors(
                        b.and_(exists, e.below(e.add(d, CHUNK - 1), dim)),
                        [e.at(start, e.mul(begin, FLOAT_BYTES)) for begin in begins],
                        lambda: [self.load_elements(start, begin, dim, exists) for begin in begins],
                    )
                    self.split_and_store(halves, e.at(tiles, e.mul(d, self.chunk_bytes // CHUNK)))
                    return [self._larger(*pair) for pair in zip(seen, halves, strict=True)]

                seen = e.loop(0, wide, CHUNK, [e.const_bits(0)] * 2, split_chunk)
                e.store(k, e.at(non_finite_rows, e.mul(e.add(carried[0], 1), WORD)), WORD)
                some = b.icmp_unsigned(
                    "!=", b.or_(*map(self.huge_lanes, seen)), ir.Constant(bits, 0)
                )
                return [e.add(carried[0], b.zext(some, INT64))]

            (number,) = e.loop(0, emit_round_to_chunks(e, count), 1, [e.index(0)], split_row)
            e.store(number, non_finite_rows, WORD)
        return function

    def split_columns(self) -> Value:
        """A function `(rows, row, count, dim, to) -> left_out`: columns of V as terms, as tiles.

        `left_out` tells whether there are values that cannot be split; their terms are 0.
        """
        e = self.e
        arguments = [POINTER, *[INT64] * 3, POINTER]
        with e.function("split_columns", arguments, BIT) as (function, args):
            rows, row, count, dim, target = args
            b, bits = e.builder, ir.IntType(e.lanes)
            loaded, transposed = e.stack_vectors(e.lanes), e.stack_vectors(2 * e.lanes)

            def load_key(first: Value, d: Value, i: Value, marks: list[Value]) -> list[Value]:
                """Load 16 elements of one key, with 0 for those that cannot be split."""
                start = e.at(rows, e.mul(e.add(first, i), row))
                exists = e.below(e.add(first, i), count)
                (x,) = self._load_vectors(
                    b.and_(exists, e.below(e.add(d, e.lanes - 1), dim)),
                    [e.at(start, e.mul(d, FLOAT_BYTES))],
                    lambda: [self.load_elements(start, d, dim, exists)],
                )
                left_out = self.cannot_be_split(x)
                rest = b.select(left_out, e.const(0.0), x)
                e.store_vector(rest, e.at(loaded, e.mul(i, e.vector_bytes)))
                return [b.or_(marks[0], b.bitcast(left_out, bits))]

            def transpose_half(k: Value, d: Value, n: Value, marks: list[Value]) -> list[Value]:
                """Transpose 16 elements of the first or the second 16 keys of a chunk."""
                first = e.add(k, e.mul(n, e.lanes))
                marks = e.loop(0, e.lanes, 1, marks, partial(load_key, first, d))
                place = e.at(transposed, e.mul(n, e.vector_bytes))
                for i, x in enumerate(e.transpose(vectors_at(e, loaded, e.lanes))):
                    e.store_vector(x, e.at(place, 2 * i * e.vector_bytes))
                return marks

            def store_column(tiles: Value, i: Value, _: list[Value]) -> None:
                place = e.at(transposed, e.mul(i, 2 * e.vector_bytes))
                self.split_and_store(vectors_at(e, place, 2), e.at(tiles, e.mul(i, TILE_BYTES)))

            def store_columns(k: Value, chunk: Value, d: Value, marks: list[Value]) -> list[Value]:
                """Store 16 columns of a chunk of keys."""
                marks = e.loop(0, 2, 1, marks, partial(transpose_half, k, d))
                tiles = e.at(chunk, e.mul(b.sdiv(d, e.index(TILE_ROWS)), self.column_band))
                e.loop(0, e.lanes, 1, [], partial(store_column, tiles))
                return marks

            def split_chunk(k: Value, marks: list[Value]) -> list[Value]:
                chunk = e.at(target, e.mul(k, self.row_band // CHUNK))
                return e.loop(
                    0,
                    emit_round_to_chunks(e, dim),
                    e.lanes,
                    marks,
                    partial(store_columns, k, chunk),
                )

            nothing = [ir.Constant(bits, 0)]
            (marks,) = e.loop(0, emit_round_to_chunks(e, count), CHUNK, nothing, split_chunk)
            b.ret(b.icmp_unsigned("!=", marks, ir.Constant(bits, 0)))
        return function

    def transpose_rows(self, number: int) -> Value:
        """A function `(rows, row, count, dim, to)`: pairs of neighbouring rows, elements in lanes.

        A right factor for products over `number` rows, in panels of 32 columns. Elements that
        cannot be split, and rows from `count` on, are 0.
        """
        e = self.e
        with e.function("transpose_rows", [POINTER, *[INT64] * 3, POINTER]) as (function, args):
            rows, row, count, dim, target = args
            b = e.builder

            def store_rows(q: Value, _: list[Value]) -> None:
                starts = [e.at(rows, e.mul(e.add(q, i), row)) for i in range(2)]
                exist = [e.below(e.add(q, i), count) for i in range(2)]
                here = self.packed_row(target, q)

                def store_elements(d: Value, _: list[Value]) -> None:
                    both = []
                    for start, exists in zip(starts, exist, strict=True):
                        x = self.load_elements(start, d, dim, exists)
                        huge = b.icmp_unsigned(">", self.magnitude(x), e.const_bits(_HIGHEST))
                        both.append(self.rounded_terms(b.select(huge, e.const(0.0), x)))
                    panel = e.round_down(d, CHUNK)
                    inside = e.mul(e.sub(d, panel), FLOAT_BYTES)
                    stride = number // CHUNK * self.panel_bytes
                    place = e.at(here, e.mul(panel, stride // CHUNK), inside)
                    self.store_term_pairs(list(zip(*both, strict=True)), place)

                e.loop(0, emit_round_to_chunks(e, dim), e.lanes, [], store_elements)

            e.loop(0, number, 2, [], store_rows)
        return function

    def band_bytes(self, dim: Value) -> Value:
        """Bytes of the tiles of 16 rows of K."""
        e = self.e
        return e.mul(emit_round_to_chunks(e, dim), self.chunk_bytes // CHUNK)

    def float_rows(
        self, dtype: str, copy: Value, rows: RowView, count: Value, dim: Value, to: Value
    ) -> tuple[Value, Value]:
        """Rows of float32 with adjacent elements and bytes between rows: as they lie, or copied."""
        e, b = self.e, self.e.builder
        needed = b.icmp_signed("!=", rows.element, e.index(FLOAT_BYTES))
        if dtype != "float32":
            needed = b.icmp_signed("==", dim, dim)
        with b.if_then(needed, likely=False):
            b.call(copy, [*rows, count, dim, to])
        return b.select(needed, to, rows.pointer), b.select(needed, e.mul(dim, 4), rows.row)

    def pack_rows(
        self, places: Sequence[Value], dim: Value, packed: Value, sign: Value | None
    ) -> Value:
        """One row for each lane, as pairs of its elements, times `sign`.

        Gives a bit for each row that cannot be split.
        """
        e, b, bits = self.e, self.e.builder, ir.IntType(self.e.lanes)

        def pack_elements(d: Value, seen: list[Value]) -> list[Value]:
            columns = e.transpose([self.load_elements(place, d, dim) for place in places])
            marks = seen[0]
            for x in columns:
                marks = b.or_(marks, self.huge_lanes(self.magnitude(x)))
            if sign is not None:
                columns = [b.fmul(x, sign) for x in columns]
            split = [self.rounded_terms(x) for x in columns]
            end = self.packed_row(packed, d)
            for p in range(e.lanes // 2):
                both = list(zip(split[2 * p], split[2 * p + 1], strict=True))
                self.store_term_pairs(both, e.at(end, p * self.width))
            return [marks]

        (marks,) = e.loop(
            0, emit_round_to_chunks(e, dim), e.lanes, [ir.Constant(bits, 0)], pack_elements
        )
        return b.zext(marks, INT64)

    # What cannot be split

    def magnitude(self, x: Value) -> Value:
        """The bits of the magnitude, which have the order of the numbers; NaN is the largest."""
        return self.e.builder.and_(self.e.as_bits(x), self.e.const_bits(_MAGNITUDE))

    def _larger(self, seen: Value, x: Value) -> Value:
        """The larger of two magnitudes in each lane, of which the first is given as bits."""
        b, size = self.e.builder, self.magnitude(x)
        return b.select(b.icmp_unsigned(">", size, seen), size, seen)

    def huge_lanes(self, magnitude: Value) -> Value:
        """Which elements of rows of Q or K cannot be split: a bit for each lane."""
        e, b = self.e, self.e.builder
        above = b.icmp_unsigned(">", magnitude, e.const_bits(_HIGHEST))
        return b.bitcast(above, ir.IntType(e.lanes))

    def cannot_be_split(self, x: Value) -> Value:
        """Which elements of V are huge or not finite, or have terms that tiles would take for 0."""
        e, b = self.e, self.e.builder
        size = self.magnitude(x)
        tiny = b.icmp_unsigned("<", size, e.const_bits(_LOWEST))
        tiny = b.and_(tiny, b.icmp_unsigned("!=", size, e.const_bits(0)))
        return b.or_(tiny, b.icmp_unsigned(">", size, e.const_bits(_HIGHEST)))
