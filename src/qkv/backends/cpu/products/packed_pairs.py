"""Products of rows of bfloat16 with a factor that is packed for vectors of queries.

    out[i, q]  =  sum_p rows[i, p] . packed[p, q]          p: a pair of neighbouring elements

The rows lie in memory with adjacent elements. A row of the packed factor has `vectors` vectors with
a pair of each query in a lane, or, for an instruction that multiplies two rows by two (BFMMLA of
Arm), two rows have a *quad* of each query: two neighbouring pairs, four elements. Products are
added in the same order, so that no bit depends on which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, FLOAT, INT16, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.bfloat16 import (
    emit_round_to_chunks,
    load_chunk,
    multiply_add_pairs,
    multiply_add_quads,
    present_elements,
    zip_chunks,
)
from qkv.backends.cpu.products.layout import CHUNK
from qkv.backends.cpu.products.query_lanes import (
    MeansOfHalf,
    SumOrder,
    add_in_halves,
    combine_rows,
    dot_rows,
    dot_tile,
    store_vectors,
    vectors_at,
)


class PackedPairs:
    """A factor packed as pairs, and its products."""

    elements = 2
    """Elements of a *term*, which one instruction multiplies."""

    def __init__(self, e: Emitter, vectors: int, keys: int) -> None:
        self.e, self.vectors, self.keys = e, vectors, keys
        self.width = vectors * e.vector_bytes

    def packed_rows(self, pairs: list[Value]) -> list[Value]:
        """One vector of queries, given all their pairs in order, as it is packed in each row."""
        return pairs

    def pairs_at(self, packed: Value, p: Value) -> list[Value]:
        """The pairs of number p of all queries, a vector of them for each vector of queries."""
        return vectors_at(self.e, packed, self.vectors, p)

    def finish(self, pairs: Value, count: Value) -> None:
        """Make the packed factor of `count` rows of pairs, in place; their number is even."""

    def product_function(self, name: str, *, onto: bool) -> Value:
        """A function `(rows, packed, out, row, count, pairs)`:

        out[i, :] = (out[i, :] if onto else 0) + sum_p rows[i, p] . packed[p, :]
        """
        e = self.e
        with e.function(name, [*[POINTER] * 3, *[INT64] * 3]) as (function, args):
            rows, packed, out, row, count, pairs = args

            def store_products(i: Value, products: list[Value], _: list[Value]) -> list[Value]:
                self._store_rows(out, i, products, onto=onto)
                return []

            self.dot_rows(rows, row, count, packed, pairs, store_products)
        return function

    def dot_rows(
        self,
        rows: Value,
        row: Value,
        count: Value,
        packed: Value,
        pairs: Value,
        finish: Callable[[Value, list[Value], list[Value]], list[Value]],
        means_of_half: MeansOfHalf | None = None,
    ) -> None:
        """`query_lanes.dot_rows` of rows of so many pairs. Rows and factor have whole terms."""
        dot_rows(
            self.e, rows, row, count, packed, self.vectors, self.terms(pairs), self.keys, [],
            finish, SumOrder(multiply_add_pairs, means_of_half), self.tile,
        )  # fmt: skip

    def interleave_function(self, name: str) -> Value:
        """A function `(rows, row, count, dim, to)` that makes of rows what `combine_rows` reads.

        Elements of two neighbouring rows become pairs; rows of pairs are padded to whole chunks.
        Quads need none: they are interleaved as they are multiplied.
        """
        e = self.e
        with e.function(name, [POINTER, *[INT64] * 3, POINTER]) as (function, args):
            rows, row, count, dim, target = args
            half = e.mul(2, emit_round_to_chunks(e, dim))

            def interleave_rows(k: Value, _: list[Value]) -> None:
                first, second = (e.at(rows, e.mul(e.add(k, n), row)) for n in range(2))
                exists, to = e.below(e.add(k, 1), count), e.at(target, e.mul(k, half))

                def interleave_chunk(d: Value, _: list[Value]) -> None:
                    present = present_elements(e, e.sub(dim, d))
                    beside = e.builder.select(exists, e.at(second, e.mul(d, 2)), e.zeros_address())
                    both = [load_chunk(e, at, present) for at in (e.at(first, e.mul(d, 2)), beside)]
                    store_vectors(e, e.at(to, e.mul(d, 4)), zip_chunks(e, *both))

                e.loop(0, dim, CHUNK, [], interleave_chunk)

            e.loop(0, count, 2, [], interleave_rows)
        return function

    def combine_rows(
        self,
        first_row: Value,
        row_stride: Value,
        count: Value,
        packed: Value,
        dim: Value,
        finish: Callable[[Value, list[Value]], None],
    ) -> None:
        """`query_lanes.combine_rows`: sum_k row[k][d] * packed[k], rows interleaved."""
        width = self.e.mul(4, emit_round_to_chunks(self.e, dim))
        pairs = self.e.builder.sdiv(self.e.add(count, 1), self.e.index(2))
        combine_rows(
            self.e, first_row, width, pairs, packed, self.vectors, dim, self.keys, finish,
            multiply_add=multiply_add_pairs,
        )  # fmt: skip

    def terms(self, pairs: Value) -> Value:
        """How many terms so many pairs are."""
        return pairs

    def tile(
        self,
        e: Emitter,
        rows: Sequence[Value],
        packed: Value,
        vectors: int,
        terms: Value,
        sums: SumOrder,
    ) -> list[Value]:
        """`query_lanes.dot_tile` of so many terms."""
        return dot_tile(e, rows, packed, vectors, terms, sums)

    def _store_rows(self, out: Value, i: Value, products: list[Value], *, onto: bool) -> None:
        e = self.e
        place = e.at(out, e.mul(i, self.width))
        if onto:
            held = [e.load_vector(e.at(place, n * e.vector_bytes)) for n in range(len(products))]
            products = list(map(e.builder.fadd, held, products))
        store_vectors(e, place, products)


class PackedQuads(PackedPairs):
    """A factor packed as quads: one row has those of the first half of the queries of each vector,
    the next row those of the second half."""

    elements = 4

    def packed_rows(self, pairs: list[Value]) -> list[Value]:
        e, half = self.e, self.e.lanes // 2
        first = [i for lane in range(half) for i in (lane, e.lanes + lane)]
        return [
            e.builder.shuffle_vector(*both, e.shuffle_mask([i + start for i in first]))
            for both in zip(pairs[::2], pairs[1::2], strict=True)
            for start in (0, half)
        ]

    def pairs_at(self, packed: Value, p: Value) -> list[Value]:
        e, b = self.e, self.e.builder
        is_second = b.trunc(b.and_(p, e.index(1)), BIT)
        first = e.round_down(p, 2)
        rows = (vectors_at(e, packed, self.vectors, e.add(first, n)) for n in range(2))
        found = []
        for both in zip(*rows, strict=True):
            even, odd = (
                b.shuffle_vector(*both, e.shuffle_mask(range(n, 2 * e.lanes, 2))) for n in range(2)
            )
            found.append(b.select(is_second, odd, even))
        return found

    def finish(self, pairs: Value, count: Value) -> None:
        e = self.e

        def pack_two_rows(p: Value, _: list[Value]) -> None:
            for j in range(self.vectors):
                row = e.at(pairs, e.mul(p, self.width), j * e.vector_bytes)
                places = [row, e.at(row, self.width)]
                for place, packed in zip(
                    places, self.packed_rows([e.load_vector(at) for at in places]), strict=True
                ):
                    e.store_vector(packed, place)

        e.loop(0, count, 2, [], pack_two_rows)

    def terms(self, pairs: Value) -> Value:
        return self.e.builder.sdiv(self.e.add(pairs, 1), self.e.index(2))

    def tile(
        self,
        e: Emitter,
        rows: Sequence[Value],
        packed: Value,
        vectors: int,
        terms: Value,
        sums: SumOrder,
    ) -> list[Value]:
        """Rows are multiplied two by two, an odd one with itself beside it."""
        left = [*rows, *rows[-1:]][: len(rows) + len(rows) % 2]
        of_half = sums.means_of_half
        totals = add_in_halves(
            e, terms, [e.const(0.0)] * (len(left) * vectors),
            lambda q, old: self._add_quads(self._two_by_two(left, q), packed, q, old),
            of_half and (lambda half: self._beside_totals(of_half(half))),
        )  # fmt: skip
        return self._in_rows(totals)[: len(rows) * vectors]

    def combine_rows(
        self,
        first_row: Value,
        row_stride: Value,
        count: Value,
        packed: Value,
        dim: Value,
        finish: Callable[[Value, list[Value]], None],
    ) -> None:
        """Rows as they lie. `finish(d, sums)` is given four columns, also where fewer are left."""
        e, b = self.e, self.e.builder
        halves, floats, last = ir.VectorType(INT16, 4), ir.VectorType(FLOAT, 4), e.sub(count, 1)
        in_turns = [0, 4, 1, 5, 2, 6, 3, 7]

        def add_keys(rows: list[Value], q: Value, totals: list[Value]) -> list[Value]:
            """Quad q of the keys: elements of a column of four rows side by side."""
            pairs = [
                b.bitcast(b.shuffle_vector(*two, e.shuffle_mask(in_turns)), floats)
                for two in (rows[:2], rows[2:])
            ]
            quads = [b.shuffle_vector(*pairs, e.shuffle_mask(in_turns[n : n + 4])) for n in (0, 4)]
            return self._add_quads(quads, packed, q, totals)

        def sum_columns(d: Value, _: list[Value]) -> None:
            start = e.at(first_row, e.mul(d, 2))

            def load_row(k: Value) -> Value:
                return e.load(e.at(start, e.mul(k, row_stride)), halves, 2)

            def load_last_row(k: Value) -> Value:
                row, nothing = load_row(e.least(k, last)), ir.Constant(halves, None)
                return b.select(e.below(k, count), row, nothing)

            def adding(
                load: Callable[[Value], Value],
            ) -> Callable[[Value, list[Value]], list[Value]]:
                return lambda q, old: add_keys(
                    [load(e.add(e.mul(q, 4), n)) for n in range(4)], q, old
                )

            whole, zeros = b.sdiv(count, e.index(4)), [e.const(0.0)] * (4 * self.vectors)
            totals = e.loop(0, whole, 1, zeros, adding(load_row))
            end = b.sdiv(e.add(count, 3), e.index(4))
            finish(d, self._in_rows(e.loop(whole, end, 1, totals, adding(load_last_row))))

        e.loop(0, dim, 4, [], sum_columns)

    def _beside_totals(self, queries: list[Value]) -> list[Value]:
        """A number of each query, a vector for each vector of queries, as two rows of totals."""
        e, half = self.e, self.e.lanes // 2
        lanes = [2 * (lane // 4) + lane % 2 for lane in range(e.lanes)]
        masks = [e.shuffle_mask([start + lane for lane in lanes]) for start in (0, half)]
        return [e.builder.shuffle_vector(x, x, mask) for mask in masks for x in queries]

    def _two_by_two(self, rows: list[Value], q: Value) -> list[Value]:
        """Quad q of each row, of two rows in one vector of four lanes."""
        e, quad = self.e, ir.VectorType(FLOAT, 2)
        quads = [e.load(e.at(row, e.mul(q, 8)), quad, 2) for row in rows]
        both = e.shuffle_mask(range(4))
        return [
            e.builder.shuffle_vector(*two, both)
            for two in zip(quads[::2], quads[1::2], strict=True)
        ]

    def _add_quads(
        self, two_rows: list[Value], packed: Value, q: Value, totals: list[Value]
    ) -> list[Value]:
        """Add the products of quads of two rows each with those in rows 2q, 2q + 1 of `packed`."""
        e, repeated = self.e, self.e.shuffle_mask([0, 1, 2, 3] * (self.e.lanes // 4))
        left = [e.builder.shuffle_vector(x, x, repeated) for x in two_rows]
        columns = vectors_at(e, packed, 2 * self.vectors, q)
        factors = [(x, y) for x in left for y in columns]
        return [
            multiply_add_quads(e, x, y, total)
            for (x, y), total in zip(factors, totals, strict=True)
        ]

    def _in_rows(self, totals: list[Value]) -> list[Value]:
        """Rows with queries in lanes, of totals of 2 x 2 products in every four lanes."""
        e, found = self.e, []
        masks = [
            e.shuffle_mask([i + n for i in range(m, 2 * e.lanes, 4) for n in range(2)])
            for m in (0, 2)
        ]
        for first in range(0, len(totals), 2 * self.vectors):
            halves = totals[first:][: self.vectors], totals[first + self.vectors :][: self.vectors]
            for mask in masks:
                found += [
                    e.builder.shuffle_vector(*both, mask) for both in zip(*halves, strict=True)
                ]
        return found


def packed_pairs(e: Emitter, shape: TileShape, vectors: int) -> PackedPairs:
    """The way of packing that fits the instructions of a machine."""
    return (PackedQuads if shape.quads else PackedPairs)(e, vectors, shape.keys_of(vectors))
