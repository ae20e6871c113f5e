"""The forward kernel for float32 and float16 on machines with bfloat16 tiles.

A float32 has 24 significant bits, a bfloat16 has 8: every float32 is a sum of three bfloat16
numbers, every float16 of two. So products of tiles, of which a machine does some thirteen times as
many as multiply-adds, multiply operands of these types, part by part:

    x = x1 + x2 + x3,   |x2| <= 2^-8 |x1|,   |x3| <= 2^-9 |x2|
    x . y = x1 . y1 + (x1 . y2 + x2 . y1) + (x1 . y3 + x2 . y2 + x3 . y1) + rest

The rest is at most 2^-24 |x| . |y|, what rounding a product to float32 takes, and of either sign.
Sums are float32 as ever. For float16 nothing is left out of the scores.

Everything between the products is as in `pairs`. Q, K and V are rounded to parts; weights, of which
there are many more, are cut, which takes fewer steps and may triple the rest.

Tiles take subnormal numbers for 0, and what is not finite, or huge, has no parts. Keys and queries
with such elements are found when they are split, and their scores are computed one by one; such
values are left out of the parts and added one by one. So every row gets the bits that it would get
if what it may not see were anything else.

Sources: Dekker, "A floating-point technique for extending the available precision" (1971); Henry,
Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations" (2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from llvmlite import ir

from qkv.backends.cpu import matrix_unit, storage
from qkv.backends.cpu.forward import BLOCK_MAX, STATS, ForwardKey, RowSums
from qkv.backends.cpu.frame import WORD, Rows, Shape
from qkv.backends.cpu.ir import BIT, INT32, INT64, POINTER, Value
from qkv.backends.cpu.matrix_unit import TILE_BYTES, TILE_ROWS
from qkv.backends.cpu.packing import copy_rows
from qkv.backends.cpu.pairs import (
    CHUNK,
    Buffers,
    Meeting,
    PairForward,
    chunks,
    split,
    upper_halves,
    whole,
)
from qkv.backends.cpu.products import store_vectors, vectors_at
from qkv.backends.cpu.turning import turned_bytes
from qkv.problem.expressions import TRUE
from qkv.problem.spec import Spec
from qkv.problem.tiles import TileKind

BLOCK_KV = 128
"""Keys whose scores are held at once: they and their weights fit the nearest cache."""

_PRODUCTS: dict[int, matrix_unit.Products] = {
    2: ((0, 1), (1, 1), (1, 0), (0, 0)),
    3: ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)),
}
"""By number of parts: those that matter, each beside one that shares a part with it. The largest
comes last: what is added to it is rounded as it is."""

_LOWEST, _HIGHEST = (int(np.float32(x).view(np.int32)) for x in (2.0**-100, 2.0**60))
"""Bits of the least and the largest magnitude whose products tiles take whole."""
_MAGNITUDE = 2**31 - 1
_KEYS_BESIDE = 16
"""Keys that are weighed beside one step of a product."""
_ODD_BYTES = 2048
"""For the keys of a block that have no parts, and how many there are."""
_UPPER = -(2**16)
"""The bits of a float32 that a bfloat16 keeps."""
_FLOAT_BYTES = 4


def part_scratch_bytes(spec: Spec, shape: Shape) -> int:
    """Memory of one worker: a block of scores, weights, V, K, copied rows and tables; Q, O and
    statistics of each block of queries."""
    width, parts = 4 * shape.block_q, shape.parts
    head_dim, v_head_dim = chunks(spec.head_dim), chunks(spec.v_head_dim)
    scores = BLOCK_KV * width + BLOCK_KV // 2 * parts * width
    rows = 2 * parts * (head_dim + v_head_dim) + _FLOAT_BYTES * max(head_dim, v_head_dim)
    own = width * (parts * head_dim // 2 + v_head_dim + STATS + 1)
    turned = turned_bytes(spec, BLOCK_KV, 4 * shape.lanes)
    total = _ODD_BYTES + scores + BLOCK_KV * rows + shape.together * own + turned
    return -(-total // 4096) * 4096


def emit_parts(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    kernel = _PartForward(key)
    kernel.all_tasks()
    return str(kernel.e.module)


class _PartForward(PairForward):
    def __init__(self, key: ForwardKey) -> None:
        super().__init__(key)
        self.block_kv = BLOCK_KV
        self.weights_at = BLOCK_KV * self.width
        self.chunk_bytes = self.parts * matrix_unit.TILE_SIZE
        """Of 16 rows and 32 columns of a left factor."""
        self.value_row = BLOCK_KV // CHUNK * self.chunk_bytes
        self.unrolled = (2, 1)
        self.stats_rows = STATS + 1
        self.part_bytes = TILE_ROWS * self.width
        """From a part of 16 packed pairs to the next part."""

    # Parts

    def rounded(self, x: Value) -> list[Value]:
        """The parts of a vector of float32: bits whose lower half is 0."""
        e, b = self.e, self.e.builder
        found = []
        for n in range(self.parts):
            bits = e.as_bits(x)
            if n < self.parts - 1:
                bits = b.and_(b.add(bits, e.const_bits(0x8000)), e.const_bits(_UPPER))
                x = b.fsub(x, e.as_floats(bits))
            found.append(bits)
        return found

    def pair(self, first: Value, second: Value) -> Value:
        """Two parts of each lane side by side."""
        e, b = self.e, self.e.builder
        return e.as_floats(
            b.or_(b.lshr(first, e.const_bits(16)), b.and_(second, e.const_bits(_UPPER)))
        )

    def place_of_pair(self, scores: Value, k: Value, width: Value) -> Value:
        return self.packed_row(self.e.at(scores, self.weights_at), k)

    def packed_row(self, packed: Value, element: Value) -> Value:
        """Where the pair of an even element and the next one is in its first part."""
        e = self.e
        chunk = e.round_down(element, CHUNK)
        inside = e.mul(e.sub(element, chunk), self.width // 2)
        return e.at(packed, e.mul(chunk, self.parts * self.width // 2), inside)

    def store_pair(self, first: Value, second: Value, place: Value) -> None:
        """Weights are cut: each part takes the upper bits of what the ones before it left."""
        e, b = self.e, self.e.builder
        both = [first, second]
        for n in range(self.parts):
            bits = [e.as_bits(x) for x in both]
            e.store_vector(self.pair(*bits), e.at(place, n * self.part_bytes))
            upper = [e.as_floats(b.and_(x, e.const_bits(_UPPER))) for x in bits]
            both = [b.fsub(x, part) for x, part in zip(both, upper, strict=True)]

    def clear_pairs(self, weights: Value, first: Value, stop: Value) -> None:
        e = self.e

        def clear(p: Value, _: list[Value]) -> None:
            place = self.packed_row(weights, e.mul(p, 2))
            for n in range(self.parts):
                store_vectors(e, e.at(place, n * self.part_bytes), [e.const(0.0)] * self.vectors)

        e.loop(first, stop, 1, [], clear)

    def put(self, halves: Sequence[Value], place: Value) -> None:
        """The parts of 32 elements, each a row of its tile."""
        e = self.e
        for n, (first, second) in enumerate(zip(*map(self.rounded, halves), strict=True)):
            row = upper_halves(e, first, second)
            e.store(row, e.at(place, n * matrix_unit.TILE_SIZE), e.vector_bytes)

    # Rows

    def _row(self, start: Value, d: Value, dim: Value, exists: Value | None = None) -> Value:
        """16 elements of a row of float32; 0 in place of those that are not there."""
        e, b = self.e, self.e.builder
        place = e.at(start, e.mul(d, _FLOAT_BYTES))
        left = e.sub(dim, d)
        if exists is not None:
            place = b.select(exists, place, self.zeros)
            left = b.select(exists, left, e.index(0))
        count = e.splat(b.trunc(e.least(left, e.lanes), INT32))
        live = b.icmp_signed("<", e.lane_numbers(INT32), count)
        return storage.load(e, place, "float32", e.lanes, live)

    def _rows(
        self, whole: Value, places: Sequence[Value], partly: Callable[[], list[Value]]
    ) -> list[Value]:
        """16 elements from each place, or what `partly` gives if they are not wholly there."""
        e, b = self.e, self.e.builder
        with b.if_else(whole) as (then, otherwise):
            with then:
                loaded = [e.load_vector(place, aligned=False) for place in places]
                after_loading = b.block
            with otherwise:
                others = partly()
                after_others = b.block
        found = []
        for one, other in zip(loaded, others, strict=True):
            either = b.phi(e.vector)
            either.add_incoming(one, after_loading)
            either.add_incoming(other, after_others)
            found.append(either)
        return found

    def split_rows(self) -> Value:
        """A function `(from, row, count, dim, to, odd)`: rows of K in parts, as tiles.

        `odd` begins with the number of keys without parts, then has which they are.
        """
        e = self.e
        with e.function("split_rows", [POINTER, *[INT64] * 3, *[POINTER] * 2]) as (function, args):
            source, row, count, dim, target, odd = args
            b, bits = e.builder, ir.IntType(e.lanes)
            wide, band = whole(e, dim), self.band(dim)

            def key(k: Value, found: list[Value]) -> list[Value]:
                start, exists = e.at(source, e.mul(k, row)), e.below(k, count)
                inside = e.mul(b.and_(k, e.index(TILE_ROWS - 1)), TILE_BYTES)
                tiles = e.at(target, e.mul(b.sdiv(k, e.index(TILE_ROWS)), band), inside)

                def chunk(d: Value, seen: list[Value]) -> list[Value]:
                    begins = [e.add(d, n) for n in (0, e.lanes)]
                    halves = self._rows(
                        b.and_(exists, e.below(e.add(d, CHUNK - 1), dim)),
                        [e.at(start, e.mul(begin, _FLOAT_BYTES)) for begin in begins],
                        lambda: [self._row(start, begin, dim, exists) for begin in begins],
                    )
                    self.put(halves, e.at(tiles, e.mul(d, self.chunk_bytes // CHUNK)))
                    return [self._larger(*pair) for pair in zip(seen, halves, strict=True)]

                seen = e.loop(0, wide, CHUNK, [e.const_bits(0)] * 2, chunk)
                e.store(k, e.at(odd, e.mul(e.add(found[0], 1), WORD)), WORD)
                some = b.icmp_unsigned("!=", b.or_(*map(self.huge, seen)), ir.Constant(bits, 0))
                return [e.add(found[0], b.zext(some, INT64))]

            (found,) = e.loop(0, whole(e, count), 1, [e.index(0)], key)
            e.store(found, odd, WORD)
        return function

    def split_columns(self) -> Value:
        """A function `(rows, row, count, dim, to) -> bit`: columns of V in parts, as tiles.

        Whether there are values without parts, which are left out.
        """
        e = self.e
        arguments = [POINTER, *[INT64] * 3, POINTER]
        with e.function("split_columns", arguments, BIT) as (function, args):
            rows, row, count, dim, target = args
            b, bits = e.builder, ir.IntType(e.lanes)
            loaded, turned = self._room(e.lanes), self._room(2 * e.lanes)

            def keys(k: Value, found: list[Value]) -> list[Value]:
                chunk = e.at(target, e.mul(k, self.chunk_bytes // CHUNK))

                def elements(d: Value, found: list[Value]) -> list[Value]:
                    def half(n: Value, found: list[Value]) -> list[Value]:
                        """16 keys."""
                        first = e.add(k, e.mul(n, e.lanes))

                        def key(i: Value, found: list[Value]) -> list[Value]:
                            start = e.at(rows, e.mul(e.add(first, i), row))
                            exists = e.below(e.add(first, i), count)
                            (x,) = self._rows(
                                b.and_(exists, e.below(e.add(d, e.lanes - 1), dim)),
                                [e.at(start, e.mul(d, _FLOAT_BYTES))],
                                lambda: [self._row(start, d, dim, exists)],
                            )
                            odd = self.odd(x)
                            kept = b.select(odd, e.const(0.0), x)
                            e.store_vector(kept, e.at(loaded, e.mul(i, e.vector_bytes)))
                            return [b.or_(found[0], b.bitcast(odd, bits))]

                        found = e.loop(0, e.lanes, 1, found, key)
                        place = e.at(turned, e.mul(n, e.vector_bytes))
                        for i, x in enumerate(e.transpose(vectors_at(e, loaded, e.lanes))):
                            e.store_vector(x, e.at(place, 2 * i * e.vector_bytes))
                        return found

                    found = e.loop(0, 2, 1, found, half)
                    tiles = e.at(chunk, e.mul(b.sdiv(d, e.index(TILE_ROWS)), self.value_row))

                    def column(i: Value, _: list[Value]) -> None:
                        place = e.at(turned, e.mul(i, 2 * e.vector_bytes))
                        self.put(vectors_at(e, place, 2), e.at(tiles, e.mul(i, TILE_BYTES)))

                    e.loop(0, e.lanes, 1, [], column)
                    return found

                return e.loop(0, whole(e, dim), e.lanes, found, elements)

            (found,) = e.loop(0, whole(e, count), CHUNK, [ir.Constant(bits, 0)], keys)
            b.ret(b.icmp_unsigned("!=", found, ir.Constant(bits, 0)))
        return function

    def pack_parts(self, parts: dict[str, Value]) -> Value:
        """One vector of queries as pairs of parts; lanes beyond the last row repeat it.

        Gives a bit for each query without parts.
        """
        e = self.e
        arguments = [POINTER, POINTER, POINTER, POINTER, INT64]
        with e.function("pack", arguments, INT64) as (function, args):
            arguments_, query, packed, copy, first_row = args
            b, bits = e.builder, ir.IntType(e.lanes)
            names = ("query_row", "query_element", "head_dim", "rows")
            row, element, head_dim, rows = (self.field(arguments_, name) for name in names)
            last = e.least(e.lanes - 1, e.sub(e.sub(rows, first_row), 1))
            here = Rows(e.at(query, e.mul(first_row, row)), row, element)
            start, row = self.floats(parts, "query", here, e.add(last, 1), head_dim, copy)
            places = [e.at(start, e.mul(e.least(i, last), row)) for i in range(e.lanes)]
            sign = e.splat(self.real_field(arguments_, "sign"))

            def turn(d: Value, seen: list[Value]) -> list[Value]:
                columns = e.transpose([self._row(place, d, head_dim) for place in places])
                odd = seen[0]
                for x in columns:
                    odd = b.or_(odd, self.huge(self._magnitude(x)))
                split = [self.rounded(b.fmul(x, sign)) for x in columns]
                end = self.packed_row(packed, d)
                for p in range(e.lanes // 2):
                    both = zip(split[2 * p], split[2 * p + 1], strict=True)
                    for n, (first, second) in enumerate(both):
                        place = e.at(end, p * self.width + n * self.part_bytes)
                        e.store_vector(self.pair(first, second), place)
                return [odd]

            (odd,) = e.loop(0, whole(e, head_dim), e.lanes, [ir.Constant(bits, 0)], turn)
            b.ret(b.zext(odd, INT64))
        return function

    def band(self, dim: Value) -> Value:
        """Bytes of the tiles of 16 rows of K."""
        e = self.e
        return e.mul(whole(e, dim), self.chunk_bytes // CHUNK)

    def floats(
        self,
        parts: dict[str, Value],
        name: str,
        rows: Rows,
        count: Value,
        dim: Value,
        copy: Value,
    ) -> tuple[Value, Value]:
        """Rows of float32 with adjacent elements: where they lie, or copied."""
        e, b = self.e, self.e.builder
        dtype = self.dtypes[name]
        needed = b.icmp_signed("!=", rows.element, e.index(_FLOAT_BYTES))
        if dtype != "float32":
            needed = b.icmp_signed("==", dim, dim)
        with b.if_then(needed, likely=False):
            b.call(parts[f"copy {dtype}"], [*rows, count, dim, copy])
        return b.select(needed, copy, rows.pointer), b.select(needed, e.mul(dim, 4), rows.row)

    # What has no parts

    def _magnitude(self, x: Value) -> Value:
        """As bits, which are ordered as the numbers are; those of NaN are the largest."""
        return self.e.builder.and_(self.e.as_bits(x), self.e.const_bits(_MAGNITUDE))

    def _larger(self, seen: Value, x: Value) -> Value:
        """The larger magnitudes."""
        b, size = self.e.builder, self._magnitude(x)
        return b.select(b.icmp_unsigned(">", size, seen), size, seen)

    def huge(self, magnitude: Value) -> Value:
        """Which elements of rows of Q or K have no parts: a bit for each lane."""
        e, b = self.e, self.e.builder
        above = b.icmp_unsigned(">", magnitude, e.const_bits(_HIGHEST))
        return b.bitcast(above, ir.IntType(e.lanes))

    def odd(self, x: Value) -> Value:
        """Which elements of V have no parts, or parts that tiles take for 0."""
        e, b = self.e, self.e.builder
        size = self._magnitude(x)
        tiny = b.icmp_unsigned("<", size, e.const_bits(_LOWEST))
        tiny = b.and_(tiny, b.icmp_unsigned("!=", size, e.const_bits(0)))
        return b.or_(tiny, b.icmp_unsigned(">", size, e.const_bits(_HIGHEST)))

    def mend(self) -> Value:
        """A function `(arguments, query, key, first_row, count, odd, lanes, scores)`.

        Computes the scores of queries and keys without parts one by one. `lanes` are the bits that
        `pack` gave, `width` / `vectors` bytes apart.
        """
        e = self.e
        arguments = [*[POINTER] * 3, INT64, INT64, *[POINTER] * 3]
        with e.function("mend", arguments) as (function, args):
            arguments_, query, key, first_row, count, odd, lanes, scores = args
            b = e.builder
            names = ("query_row", "query_element", "key_row", "key_element", "head_dim", "rows")
            query_row, query_element, key_row, key_element, head_dim, rows = (
                self.field(arguments_, name) for name in names
            )
            sign = self.real_field(arguments_, "sign")
            block_q = self.shape.block_q

            def one(k: Value, lane: Value) -> None:
                row = e.least(e.add(first_row, lane), e.sub(rows, 1))
                q, its_key = e.at(query, e.mul(row, query_row)), e.at(key, e.mul(k, key_row))

                def step(d: Value, total: list[Value]) -> list[Value]:
                    x = storage.load(e, e.at(q, e.mul(d, query_element)), self.dtypes["query"])
                    y = storage.load(e, e.at(its_key, e.mul(d, key_element)), self.dtypes["key"])
                    return [e.fma(b.fmul(sign, x), y, total[0])]

                (score,) = e.loop(0, head_dim, 1, [ir.Constant(e.real, 0.0)], step)
                place = e.at(scores, e.mul(k, self.width), e.mul(lane, _FLOAT_BYTES))
                e.store(score, place, _FLOAT_BYTES)

            def odd_key(n: Value, _: list[Value]) -> None:
                k = e.load(e.at(odd, e.mul(n, WORD)), INT64, WORD)
                e.loop(0, block_q, 1, [], lambda lane, _: one(k, lane))

            def odd_query(lane: Value, _: list[Value]) -> None:
                vector = b.sdiv(lane, e.index(e.lanes))
                word = e.load(e.at(lanes, e.mul(vector, e.vector_bytes)), INT64, WORD)
                bit = b.and_(b.lshr(word, e.sub(lane, e.mul(vector, e.lanes))), e.index(1))
                e.loop(0, b.select(self._is(bit), count, e.index(0)), 1, [],
                       lambda k, _: one(k, lane))  # fmt: skip

            e.loop(1, e.add(e.load(odd, INT64, WORD), 1), 1, [], odd_key)
            e.loop(0, block_q, 1, [], odd_query)
        return function

    def _is(self, word: Value) -> Value:
        return self.e.builder.icmp_signed("!=", word, self.e.index(0))

    def mend_scores(
        self,
        arguments: Value,
        parts: dict[str, Value],
        query: Rows,
        key: Rows,
        first_row: Value,
        count: Value,
        at: Buffers,
        stats: Value,
    ) -> None:
        e, b = self.e, self.e.builder
        odd, lanes = e.at(at.scores, -_ODD_BYTES), e.at(stats, STATS * self.width)
        words = [odd, *(e.at(lanes, j * e.vector_bytes) for j in range(self.vectors))]
        some = ir.Constant(INT64, 0)
        for word in words:
            some = b.or_(some, e.load(word, INT64, WORD))
        with b.if_then(self._is(some), likely=False):
            rows = [query.pointer, key.pointer, first_row, count]
            b.call(parts["mend"], [arguments, *rows, odd, lanes, at.scores])

    def add_sifted(self) -> Value:
        """A function `(rows, row, weights, out, v_head_dim, count)`: what `split_columns` left out.

        A weight of -0.0 leaves O alone.
        """
        e = self.e
        arguments = [POINTER, INT64, POINTER, POINTER, INT64, INT64]
        with e.function("add_sifted", arguments) as (function, args):
            rows, row, weights, out, v_head_dim, count = args
            b = e.builder

            def each(k: Value, _: list[Value]) -> None:
                odd = b.trunc(b.and_(k, e.index(1)), BIT)
                place = self.packed_row(weights, b.and_(k, e.index(-2)))
                weighed: list[Value] = []
                for n in range(self.parts):
                    pairs = vectors_at(e, e.at(place, n * self.part_bytes), self.vectors)
                    halves = [split(e, pair) for pair in pairs]
                    part = [b.select(odd, second, first) for first, second in halves]
                    weighed = list(map(b.fadd, weighed, part)) if weighed else part
                    if n == 0:
                        allowed = [
                            b.icmp_signed("!=", e.as_bits(p), e.as_bits(e.const(-0.0)))
                            for p in part
                        ]

                def element(d: Value, _: list[Value]) -> None:
                    start = e.at(rows, e.mul(k, row), e.mul(d, _FLOAT_BYTES))
                    x = e.splat(e.load(start, e.real, _FLOAT_BYTES))
                    first = e.builder.extract_element(self.odd(x), ir.Constant(INT32, 0))
                    with b.if_then(first, likely=False):
                        place = e.at(out, e.mul(d, self.width))
                        total = vectors_at(e, place, self.vectors)
                        store_vectors(e, place, [
                            b.select(may, e.fma(x, weight, old), old)
                            for may, weight, old in zip(allowed, weighed, total, strict=True)
                        ])  # fmt: skip

                e.loop(0, v_head_dim, 1, [], element)

            e.loop(0, count, 1, [], each)
        return function

    # One task, all tasks

    def product(self, name: str, *, onto: bool) -> Value:
        """A function as `matrix_unit.add_products`."""
        products = _PRODUCTS[self.parts]
        if onto and self.parts == 2:
            # What is left out is 2^-16 of a weight: float16 keeps 2^-11 of it.
            products = ((0, 1), (0, 0), (1, 0))
        return matrix_unit.add_products(self.e, name, self.vectors, onto=onto, products=products)

    @property
    def beside(self) -> bool:
        """Whether weights can be computed while tiles are multiplied."""
        return self.plain and not self.spec.dropout

    def weigh_beside(self) -> Value:
        """A function `(arguments, rows, packed, scores, stats, band, count, pairs)`.

        The weights of one block of queries, whose `scores` and `stats` are given, and the scores of
        another, which take their place. Vector units have time while tiles are multiplied. In each
        step, 16 keys leave and at most as many come, if a row of Q is at least two chunks.
        """
        e = self.e
        arguments = [*[POINTER] * 5, *[INT64] * 3]
        with e.function("weigh_beside", arguments) as (function, args):
            arguments_, rows, packed, scores, stats, band, count, pairs = args
            b, width = e.builder, e.index(self.width)
            scale = e.splat(self.real_field(arguments_, "scale"))
            offsets = [j * e.vector_bytes for j in range(self.vectors)]
            sums = []
            for offset in offsets:
                here = e.at(stats, offset)
                largest = b.fmul(e.load_vector(e.at(here, BLOCK_MAX * self.width)), scale)
                sums.append(RowSums(e, here, width, largest, statistics=self.statistics))

            def weigh(j: int, k: Value, carried: list[Value]) -> tuple[Value, list[Value]]:
                place = e.at(scores, e.mul(k, width), offsets[j])
                return sums[j].weigh(b.fmul(e.load_vector(place), scale), carried, None)

            steps = b.sdiv(count, e.index(_KEYS_BESIDE))
            kept = []
            for j, offset in enumerate(offsets):
                start = e.mul(steps, _KEYS_BESIDE)
                found = self.weigh_keys(
                    e.at(scores, offset), width, start, count, sums[j].nothing, partial(weigh, j)
                )
                kept.append([self._kept(x) for x in found])
            running: list[list[Value]] = []

            def some(step: Value, group: int) -> None:
                """A share of the keys of this step."""
                if group == 0:
                    running[:] = [list(each.nothing) for each in sums]
                units = [(p, j) for p in range(_KEYS_BESIDE // 2) for j in range(self.vectors)]
                groups = len(_PRODUCTS[self.parts])
                start, stop = (len(units) * n // groups for n in (group, group + 1))
                for p, j in units[start:stop]:
                    k = e.add(e.mul(step, _KEYS_BESIDE), 2 * p)
                    first, running[j] = weigh(j, k, running[j])
                    second, running[j] = weigh(j, e.add(k, 1), running[j])
                    place = self.place_of_pair(e.at(scores, offsets[j]), k, width)
                    self.store_pair(first, second, place)
                if group == groups - 1:
                    for places, part in zip(kept, running, strict=True):
                        for place, x in zip(places, part, strict=True):
                            e.store_vector(b.fadd(e.load_vector(place), x), place)

            matrix_unit.multiply(
                e, (rows, packed, scores, band, count, pairs), self.vectors, onto=False,
                products=_PRODUCTS[self.parts], beside=matrix_unit.Beside(steps, some),
            )  # fmt: skip
            for row, places in zip(sums, kept, strict=True):
                row.advance([e.load_vector(place) for place in places])
        return function

    def _kept(self, x: Value) -> Value:
        """Where a vector is kept while registers are wanted."""
        place = self._room(1)
        self.e.store_vector(x, place)
        return place

    def _room(self, count: int) -> Value:
        """For vectors, as long as the function runs."""
        e, b = self.e, self.e.builder
        with b.goto_entry_block():
            place = b.alloca(e.vector, e.index(count))
        place.align = e.vector_bytes
        return b.bitcast(place, POINTER)

    def meet(self, with_keys: Meeting) -> None:
        """Weights of one block of queries are computed beside the scores of the next."""
        if not self.beside:
            super().meet(with_keys)
            return
        e, b = self.e, self.e.builder
        with b.goto_entry_block():
            waiting = b.bitcast(b.alloca(INT64), POINTER)
        e.store(e.index(-1), waiting, WORD)

        def one(i: Value, _: list[Value]) -> None:
            with b.if_then(b.icmp_signed("!=", with_keys.kind(i), e.index(TileKind.EMPTY))):
                before = e.load(waiting, INT64, WORD)
                some = b.icmp_signed(">=", before, e.index(0))
                fits = b.icmp_signed(">=", with_keys.pairs, e.index(CHUNK))
                if self.mask != TRUE:
                    kind = with_keys.kind(e.greater(before, 0))
                    fits = b.and_(fits, b.icmp_signed("==", kind, e.index(TileKind.FULL)))

                def in_turn() -> None:
                    with b.if_then(some):
                        with_keys.weigh(before)
                    with_keys.score(i)

                e.choose(b.and_(some, fits), lambda: with_keys.weigh_beside(before, i), in_turn)
                with b.if_then(some):
                    with_keys.add(before)
                e.store(i, waiting, WORD)

        e.loop(0, with_keys.count, 1, [], one)
        last = e.load(waiting, INT64, WORD)
        with b.if_then(b.icmp_signed(">=", last, e.index(0))):
            with_keys.weigh(last)
            with_keys.add(last)

    def rows(self) -> dict[str, Value]:
        e = self.e
        parts = {f"copy {dtype}": copy_rows(e, dtype) for dtype in sorted({*self.dtypes.values()})}
        parts["split_rows"], parts["split_columns"] = self.split_rows(), self.split_columns()
        parts["pack"] = self.pack_parts(parts)
        parts["mend"], parts["add_sifted"] = self.mend(), self.add_sifted()
        if self.beside:
            parts["weigh_beside"] = self.weigh_beside()
        return parts

    def buffers(self, scratch: Value, wide: Value, v_wide: Value) -> Buffers:
        e = self.e
        scores = e.at(scratch, _ODD_BYTES)
        weights = e.at(scores, self.weights_at)
        values = e.at(weights, BLOCK_KV // 2 * self.parts * self.width)
        keys = e.at(values, e.mul(v_wide, self.value_row // TILE_ROWS))
        copy = e.at(keys, e.mul(wide, 2 * self.parts * BLOCK_KV))
        blocks = e.at(copy, e.mul(e.greater(wide, v_wide), _FLOAT_BYTES * BLOCK_KV))
        return Buffers(scores, values, keys, copy, blocks)

    def block_of_keys(
        self,
        arguments: Value,
        parts: dict[str, Value],
        rows: Rows,
        kv_start: Value,
        count: Value,
        head_dim: Value,
        at: Buffers,
    ) -> tuple[Value, Value]:
        e = self.e
        here = Rows(e.at(rows.pointer, e.mul(kv_start, rows.row)), rows.row, rows.element)
        k, row = self.floats(parts, "key", here, count, head_dim, at.value_copy)
        odd = e.at(at.scores, -_ODD_BYTES)
        e.builder.call(parts["split_rows"], [k, row, count, head_dim, at.key_copy, odd])
        return at.key_copy, self.band(head_dim)

    def block_of_values(
        self,
        arguments: Value,
        parts: dict[str, Value],
        rows: Rows,
        kv_start: Value,
        count: Value,
        v_head_dim: Value,
        at: Buffers,
        kinds: Value,
    ) -> tuple[Value, Value, Value]:
        e = self.e
        here = Rows(e.at(rows.pointer, e.mul(kv_start, rows.row)), rows.row, rows.element)
        v, row = self.floats(parts, "value", here, count, v_head_dim, at.value_copy)
        sifted = e.builder.call(parts["split_columns"], [v, row, count, v_head_dim, at.values])
        return v, row, sifted
