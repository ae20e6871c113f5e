"""The two matrix products of attention as register tiles, lanes along head_dim.

K and V are read as they lie, rows with adjacent elements of any type, a vector at a time. Each
vector of K and V is multiplied with several rows of Q, so that it is loaded and widened once. Where
both Q and K are of one type of 16 bits and the machine multiplies that, K is not widened at all: a
lane then has two elements, which are a pair in bfloat16. The product of
two rows is first a sum in every lane; the lanes of as many products as there are lanes are then
added up together.
Matrices of scores have `score_row` bytes from row to row of Q, one element for each key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import BIT, CACHE_LINE, DOUBLE, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.emit.forbidden_pairs import forbidden_bits, is_allowed
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.bfloat16 import load_chunk, multiply_add_pairs, present_elements
from qkv.backends.cpu.products.float16 import multiply_add_halves

_PREFETCHED_BYTES = 512 * 1024
"""Rows are prefetched if all of K, or of V, has at least so many bytes. The processor follows
shorter reads by itself, and prefetching what lies in a cache takes a tenth of the time."""


def loop_over_vectors(
    e: Emitter,
    dim: Value,
    carried: list[Value],
    body: Callable[[Value, Value | None, list[Value]], list[Value]],
    *,
    narrow: bool = False,
) -> list[Value]:
    """`body(d, live, carried)` for each vector of a row; if `narrow`, a lane has two elements.

    `live` are the elements that a vector has, None if it has all.
    """
    size = 2 * e.lanes if narrow else e.lanes
    whole = e.round_down(dim, size)

    def visit_last(d: Value, old: list[Value]) -> list[Value]:
        left = e.sub(dim, d)
        return body(d, present_elements(e, left) if narrow else e.first_lanes(left), old)

    carried = e.loop(0, whole, size, carried, lambda d, old: body(d, None, old))
    return e.loop(whole, dim, size, carried, visit_last)


def load_vector_at(e: Emitter, row: Value, d: Value, dtype: str, live: Value | None) -> Value:
    """Elements from d on of a row, as `e.real`; lanes that are not `live` are 0."""
    place = e.at(row, e.mul(d, storage.ITEM_BYTES[dtype]))
    return storage.load(e, place, dtype, e.lanes, live)


def load_narrow_at(
    e: Emitter, row: Value, d: Value, live: Value | None, *, in_halves: bool
) -> Value:
    """Elements of 16 bits from d on of a row, two in a lane; those that are not `live` are 0.

    `in_halves` makes two loads of a vector, which LLVM would join if they were not settled.
    """
    place = e.at(row, e.mul(d, storage.ITEM_BYTES["bfloat16"]))
    if live is not None:
        return load_chunk(e, place, live)
    if not in_halves:
        return e.load(place, e.vector, 2)
    half = ir.VectorType(e.real, e.lanes // 2)
    parts = [e.settled(e.load(e.at(place, n * 2 * e.lanes), half, 2)) for n in range(2)]
    return e.builder.shuffle_vector(*parts, e.shuffle_mask(range(e.lanes)))


Keys = tuple[Value, Value]
"""The first of some keys, and the one after the last."""


class _Tile(NamedTuple):
    """Rows of Q, whose places are computed where they are read, and rows of K."""

    rows: int
    query_row: Callable[[int], Value]
    key_rows: list[Value]
    head_dim: Value


class RowProducts:
    """Writes the functions of one kernel; `dtypes` are those of query, key and value in memory."""

    def __init__(
        self, e: Emitter, dtypes: tuple[str, str, str], score_row: int, shape: TileShape
    ) -> None:
        self.e, self.shape = e, shape
        query_dtype, self.key_dtype, self.value_dtype = dtypes
        self.score_row = score_row
        has_16_bits = storage.ITEM_BYTES[self.key_dtype] == 2
        self.reach = (shape.narrow_reach if has_16_bits else 0) or shape.reach
        """Number of bytes by which prefetching runs ahead."""
        self.narrow = query_dtype == self.key_dtype and query_dtype in shape.narrow_rows
        """Whether Q and K are multiplied without being widened, two elements in a lane."""
        self.query_dtype = query_dtype if self.narrow else storage.real_dtype(e)
        """The type in which the functions find Q."""
        self.query_bytes = storage.ITEM_BYTES[self.query_dtype]
        self.at_once = shape.products_at_once
        """Number of sums, each of them a vector, that a tile keeps in registers."""
        self.tiles = [rows for rows in (4, 2, 1) if rows <= self.at_once]
        """Rows of Q that a tile multiplies at once."""

    # Prefetching rows of K or V

    def prefetch_share(
        self,
        row: Value,
        size: Value,
        first: Value,
        stop: Value,
        rows: Value,
        keys: Value,
        total: Value,
        ahead: Value | None = None,
    ) -> tuple[Value, Value]:
        """`(ahead, asked)`: how far ahead of each row a tile prefetches, and how much, in bytes.

        Rows of K or V have `size` bytes and lie `row` bytes apart; the tile has the rows of Q from
        `first` to `stop`, of `rows`. A tile that has all rows prefetches whole rows, just in time.
        If several tiles read the same `keys` one after the other, each prefetches its share of the
        keys that follow, so that memory is never idle. If these are not in the order of memory,
        `ahead` says how far ahead they are. `total` are the bytes of all rows of K or V.
        """
        e, b = self.e, self.e.builder
        lines = b.sdiv(e.add(size, CACHE_LINE - 1), e.index(CACHE_LINE))
        begin, end = (e.mul(b.sdiv(e.mul(lines, i), rows), CACHE_LINE) for i in (first, stop))
        asked = b.select(e.below(total, _PREFETCHED_BYTES), e.index(0), e.sub(end, begin))
        if ahead is not None:
            return e.add(ahead, begin), asked
        in_reach = e.larger_of(b.sdiv(e.index(self.reach), e.larger_of(size, 1)), 1)
        alone = b.icmp_signed("==", e.sub(stop, first), rows)
        rows_ahead = b.select(alone, e.least(in_reach, keys), keys)
        return e.add(e.mul(row, rows_ahead), begin), asked

    def prefetch(self, row: Value, ahead: Value, asked: Value) -> None:
        """Prefetch `asked` bytes line by line, in the order in which memory is read fastest."""
        e = self.e
        later = e.at(row, ahead)
        e.loop(
            0, asked, CACHE_LINE, [],
            lambda offset, _: e.prefetch(e.at(later, offset), soon=self.shape.nearest),
        )  # fmt: skip

    # S = Q K^T

    def _load(
        self, row: Value, d: Value, dtype: str, live: Value | None, *, in_halves: bool = False
    ) -> Value:
        """A vector of Q or K; of pairs `in_halves` for one row of Q, as memory is read faster.

        That was measured with vectors of 64 bytes.
        """
        if self.narrow:
            in_halves = in_halves and self.e.lanes == 16
            return load_narrow_at(self.e, row, d, live, in_halves=in_halves)
        return load_vector_at(self.e, row, d, dtype, live)

    def _multiply_add(self, x: Value, y: Value, total: Value) -> Value:
        if not self.narrow:
            return self.e.fma(x, y, total)
        multiply_add = multiply_add_pairs if self.query_dtype == "bfloat16" else multiply_add_halves
        return multiply_add(self.e, x, y, total)

    def scores_function(self, rows: int) -> Value:
        """A function: S of `rows` rows of Q with a segment of keys, or with the `only` key."""
        e = self.e
        keys = self.at_once // rows
        arguments = [*[POINTER] * 3, *[INT64] * 5, BIT]
        with e.function(f"scores_{rows}", arguments) as (function, args):
            key, query, out, key_row, head_dim, count, ahead, asked, only = args

            def query_row(i: int) -> Value:
                return e.at(query, e.mul(i, head_dim, self.query_bytes))

            # No group asks which of its keys exist. The last one begins earlier, and computes some
            # scores again; if there are fewer keys than a group has, the last key is repeated.
            offsets = [e.mul(e.least(j, e.sub(count, 1)), key_row) for j in range(keys)]
            last = e.larger_of(e.sub(count, keys), 0)

            def multiply_keys(k: Value, _: list[Value]) -> None:
                first = e.least(k, last)
                start = e.at(key, e.mul(first, key_row))
                key_rows = [e.at(start, offset) for offset in offsets]
                prefetched = e.builder.select(e.below(0, asked), e.add(k, keys), k)
                e.loop(
                    k, prefetched, 1, [],
                    lambda j, _: self.prefetch(e.at(key, e.mul(j, key_row)), ahead, asked),
                )  # fmt: skip
                tile = _Tile(rows, query_row, key_rows, head_dim)

                def multiply(products: Callable[[_Tile], list[Value]]) -> Callable[[], None]:
                    return lambda: self._store_products(products(tile), keys, out, first)

                any_rows = multiply(self._products)
                if e.real == DOUBLE:
                    any_rows()
                    return
                e.choose(
                    e.below(head_dim, e.lanes + 1),
                    multiply(self._products_of_short_rows),
                    lambda: e.choose(only, multiply(self._products_of_only_key), any_rows),
                )

            e.loop(0, count, keys, [], multiply_keys)
        return function

    def _products(self, tile: _Tile) -> list[Value]:
        """The lanes of the product of each row of Q with each key."""
        e, keys = self.e, len(tile.key_rows)

        def add_products(d: Value, live: Value | None, totals: list[Value]) -> list[Value]:
            q = [self._load(tile.query_row(i), d, self.query_dtype, live) for i in range(tile.rows)]
            totals = list(totals)
            for j, row in enumerate(tile.key_rows):
                x = self._load(row, d, self.key_dtype, live, in_halves=tile.rows == 1)
                for i in range(tile.rows):
                    at = i * keys + j
                    totals[at] = self._multiply_add(x, q[i], totals[at])
            return totals

        totals = [e.const(0.0)] * self.at_once
        return loop_over_vectors(e, tile.head_dim, totals, add_products, narrow=self.narrow)

    def _products_of_short_rows(self, tile: _Tile) -> list[Value]:
        """Rows of one vector: float64, because no addition is fused with a product."""
        e = self.e
        live, d = e.first_lanes(tile.head_dim), e.index(0)
        q = self._wide_query_rows(tile, d, live)
        x = [self._load_wide(row, d, self.key_dtype, live) for row in tile.key_rows]
        return [e.builder.fmul(key, query) for query in q for key in x]

    def _products_of_only_key(self, tile: _Tile) -> list[Value]:
        """An only key's score is its lse: this sum would be all the error of lse."""
        e = self.e

        def add_products(d: Value, live: Value | None, totals: list[Value]) -> list[Value]:
            x = self._load_wide(tile.key_rows[0], d, self.key_dtype, live)
            q = self._wide_query_rows(tile, d, live)
            return [e.fma(x, *pair) for pair in zip(q, totals, strict=True)]

        zero = ir.Constant(ir.VectorType(DOUBLE, e.lanes), None)
        totals = loop_over_vectors(e, tile.head_dim, [zero] * tile.rows, add_products)
        return [total for total in totals for _ in tile.key_rows]

    def _wide_query_rows(self, tile: _Tile, d: Value, live: Value | None) -> list[Value]:
        return [
            self._load_wide(tile.query_row(i), d, self.query_dtype, live) for i in range(tile.rows)
        ]

    def _load_wide(self, row: Value, d: Value, dtype: str, live: Value | None) -> Value:
        narrow = load_vector_at(self.e, row, d, dtype, live)
        return self.e.builder.fpext(narrow, ir.VectorType(DOUBLE, self.e.lanes))

    def _store_products(self, totals: list[Value], keys: int, out: Value, first: Value) -> None:
        """Add up the lanes of each total; those of a row of Q follow one another."""
        e, size = self.e, min(keys, self.e.lanes)
        for start in range(0, self.at_once, e.lanes):
            products = e.sum_each(totals[start : start + e.lanes])
            if products.type.element != e.real:
                products = e.builder.fptrunc(products, e.vector)
            for lane in range(0, e.lanes, size):
                part = e.lanes_from(products, lane, size)
                i, j = divmod(start + lane, keys)
                to = i * self.score_row + j * e.real_bytes
                at = e.at(out, to, e.mul(first, e.real_bytes))
                e.store(part, at, e.real_bytes)

    # B = P V, O = rescale * O + B

    def values_function(self, rows: int) -> Value:
        """A function that adds a segment of keys to `rows` rows of B."""
        e = self.e
        arguments = [*[POINTER] * 3, *[INT64] * 6]
        with e.function(f"values_{rows}", arguments) as (function, args):
            value, weights, block, value_row, block_row, v_head_dim, count, ahead, asked = args

            def part_of(columns: Value) -> Value:
                """The share of so many columns in the bytes that are prefetched, in whole lines."""
                part = e.mul(asked, e.least(columns, v_head_dim))
                return e.round_down(e.builder.sdiv(part, v_head_dim), CACHE_LINE)

            in_groups = self.shape.value_keys > 0
            item = storage.ITEM_BYTES[self.value_dtype]

            def prefetch_keys(keys: Keys, part: tuple[Value, Value], vectors: int) -> None:
                """Prefetch the part of each key's row that one pass reads."""

                def prefetch_key(k: Value, _: list[Value]) -> None:
                    row = e.at(value, e.mul(k, value_row))
                    if vectors * e.lanes * item <= CACHE_LINE:
                        e.prefetch(e.at(row, part[0]), soon=self.shape.nearest)
                    else:
                        self.prefetch(row, *part)

                start, stop = keys
                stop = e.builder.select(e.below(0, part[1]), stop, start)
                e.loop(start, stop, 1, [], prefetch_key)

            def add_tile(keys: Keys, d: Value, live: Value | None, vectors: int) -> None:
                # Each pass over the keys prefetches its part, so that memory is idle in none.
                first, stop = (part_of(x) for x in (d, e.add(d, vectors * e.lanes)))
                part = e.add(ahead, first), e.sub(stop, first)
                places = [
                    e.at(block, e.mul(i, block_row), e.mul(d, e.real_bytes), j * e.vector_bytes)
                    for i in range(rows)
                    for j in range(vectors)
                ]

                def add_key(k: Value, totals: list[Value]) -> list[Value]:
                    row, column = e.at(value, e.mul(k, value_row)), e.mul(k, e.real_bytes)
                    x = [
                        load_vector_at(e, row, e.add(d, j * e.lanes), self.value_dtype, live)
                        for j in range(vectors)
                    ]
                    if not in_groups:
                        self.prefetch(row, *part)
                    following = []
                    for i in range(rows):
                        at = e.at(weights, i * self.score_row, column)
                        p = e.splat(e.load(at, e.real, e.real_bytes))
                        following += [
                            e.fma(p, x[j], totals[i * vectors + j]) for j in range(vectors)
                        ]
                    return following

                totals = [e.load_vector(at) for at in places]
                if in_groups:
                    prefetch_keys(keys, part, vectors)
                totals = e.loop(*keys, 1, totals, add_key)
                for at, total in zip(places, totals, strict=True):
                    e.store_vector(total, at)

            def add_keys(keys: Keys) -> None:
                start, vectors = e.index(0), self.at_once // rows
                while vectors:

                    def add_columns(d: Value, _: list[Value], vectors: int = vectors) -> None:
                        add_tile(keys, d, None, vectors)

                    step = vectors * e.lanes
                    whole = e.round_down(v_head_dim, step)
                    e.loop(start, whole, step, [], add_columns)
                    start, vectors = whole, vectors // 2
                e.loop(
                    whole, v_head_dim, e.lanes, [],
                    lambda d, _: add_tile(keys, d, e.first_lanes(e.sub(v_head_dim, d)), 1),
                )  # fmt: skip

            if not in_groups:
                add_keys((e.index(0), count))
            else:
                # Groups cost a few per cent where rows come from a near cache.
                size = e.builder.select(e.below(0, asked), e.index(self.shape.value_keys), count)
                e.loop(
                    0, count, size, [],
                    lambda k, _: add_keys((k, e.least(e.add(k, size), count))),
                )  # fmt: skip
        return function

    def selected_values_function(self) -> Value:
        """`values_function` for one row of B, and values that are not all finite.

        A forbidden pair adds nothing: 0 * inf would be NaN.
        """
        e = self.e
        arguments = [*[POINTER] * 3, *[INT64] * 3]
        with e.function("selected_values", arguments) as (function, args):
            value, weights, block, value_row, v_head_dim, count = args
            b = e.builder
            forbidden = forbidden_bits(e)

            def add_column(d: Value, live: Value | None, _: list[Value]) -> list[Value]:
                def add_key(k: Value, totals: list[Value]) -> list[Value]:
                    x = load_vector_at(
                        e, e.at(value, e.mul(k, value_row)), d, self.value_dtype, live
                    )
                    at = e.at(weights, e.mul(k, e.real_bytes))
                    p = e.splat(e.load(at, e.real, e.real_bytes))
                    allowed = is_allowed(e, p, forbidden)
                    return [b.select(allowed, e.fma(p, x, totals[0]), totals[0])]

                at = e.at(block, e.mul(d, e.real_bytes))
                e.store_vector(e.loop(0, count, 1, [e.load_vector(at)], add_key)[0], at)
                return []

            loop_over_vectors(e, v_head_dim, [], add_column)
        return function
