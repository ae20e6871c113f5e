"""The two matrix products of attention as register tiles, lanes along head_dim.

K and V are read as they lie, rows with adjacent elements of any type, a vector at a time. Each
vector of them is multiplied with several rows of Q, so that it is loaded and widened once. A
product of two rows leaves its sum spread over the lanes; as many sums as there are lanes are then
added up together.
Matrices of scores have `score_row` bytes from row to row of Q, one element for each key.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import (
    BIT,
    CACHE_LINE,
    DOUBLE,
    INT32,
    INT64,
    POINTER,
    Emitter,
    Value,
)
from qkv.backends.cpu.machine.tiling import TileShape


def first_lanes(e: Emitter, count: Value) -> Value:
    """Which lanes there are, if there are `count`."""
    count = e.splat(e.builder.trunc(count, INT32))
    return e.builder.icmp_signed("<", e.lane_numbers(INT32), count)


def along(
    e: Emitter,
    dim: Value,
    carried: list[Value],
    body: Callable[[Value, Value | None, list[Value]], list[Value]],
) -> list[Value]:
    """`body(d, live, carried)` for each vector of a row; of a short one some lanes are live."""
    whole = e.round_down(dim, e.lanes)
    carried = e.loop(0, whole, e.lanes, carried, lambda d, old: body(d, None, old))
    return e.loop(
        whole, dim, e.lanes, carried, lambda d, old: body(d, first_lanes(e, e.sub(dim, d)), old)
    )


def vector_at(e: Emitter, row: Value, d: Value, dtype: str, live: Value | None) -> Value:
    """Elements from d on of a row, as `e.real`; 0 in lanes that are not live."""
    place = e.at(row, e.mul(d, storage.ITEM_BYTES[dtype]))
    return storage.load(e, place, dtype, e.lanes, live)


class RowProducts:
    """Writes the functions of one kernel."""

    def __init__(
        self, e: Emitter, key_dtype: str, value_dtype: str, score_row: int, shape: TileShape
    ) -> None:
        self.e, self.shape = e, shape
        self.key_dtype, self.value_dtype = key_dtype, value_dtype
        self.score_row = score_row
        self.tiles = [rows for rows in (4, 2, 1) if rows <= e.lanes]
        """Rows of Q that a tile multiplies at once."""

    # Rows of K or V that are fetched before they are needed

    def share(
        self, row: Value, size: Value, first: Value, stop: Value, rows: Value, keys: Value
    ) -> tuple[Value, Value]:
        """`(ahead, asked)`: where to fetch from, as seen from each row a tile reads, and bytes.

        Rows of K or V have `size` bytes and a distance of `row`; the tile has the rows of Q from
        `first` to `stop`, of `rows`. One tile of all rows fetches whole rows, just in time. Of
        several, which read the same `keys` one after the other, each fetches its share of the next
        keys, so that memory is never idle.
        """
        e, b = self.e, self.e.builder
        lines = b.sdiv(e.add(size, CACHE_LINE - 1), e.index(CACHE_LINE))
        begin, end = (e.mul(b.sdiv(e.mul(lines, i), rows), CACHE_LINE) for i in (first, stop))
        rows_ahead = e.greater(b.sdiv(e.index(self.shape.reach), e.greater(size, 1)), 1)
        alone = b.icmp_signed("==", e.sub(stop, first), rows)
        distance = b.select(alone, e.least(rows_ahead, keys), keys)
        return e.add(e.mul(row, distance), begin), e.sub(end, begin)

    def fetch(self, row: Value, ahead: Value, asked: Value) -> None:
        """Line by line in the order of memory, in which it is read faster."""
        e = self.e
        later = e.at(row, ahead)
        e.loop(
            0, asked, CACHE_LINE, [],
            lambda offset, _: e.prefetch(e.at(later, offset), soon=self.shape.nearest),
        )  # fmt: skip

    # S = Q K^T

    def scores(self, rows: int) -> Value:
        """S of `rows` rows of Q with a segment of keys, or with the `only` key that there is."""
        e = self.e
        keys = e.lanes // rows
        arguments = [*[POINTER] * 3, *[INT64] * 5, BIT]
        with e.function(f"scores_{rows}", arguments) as (function, args):
            key, query, out, key_row, head_dim, count, ahead, asked, only = args
            b, real = e.builder, storage.real_dtype(e)

            def query_row(i: int) -> Value:
                return e.at(query, e.mul(i, head_dim, e.real_bytes))

            def tile(k: Value, _: list[Value]) -> None:
                here = [
                    e.at(key, e.mul(e.least(e.add(k, j), e.sub(count, 1)), key_row))
                    for j in range(keys)
                ]
                e.loop(
                    k, e.add(k, keys), 1, [],
                    lambda j, _: self.fetch(e.at(key, e.mul(j, key_row)), ahead, asked),
                )  # fmt: skip

                def multiply(d: Value, live: Value | None, totals: list[Value]) -> list[Value]:
                    q = [vector_at(e, query_row(i), d, real, live) for i in range(rows)]
                    totals = list(totals)
                    for j, row in enumerate(here):
                        x = vector_at(e, row, d, self.key_dtype, live)
                        for i in range(rows):
                            at = i * keys + j
                            totals[at] = e.fma(x, q[i], totals[at])
                    return totals

                def keep(products: Value) -> None:
                    for i in range(rows):
                        part = e.part(products, i * keys, keys)
                        at = e.at(out, i * self.score_row, e.mul(k, e.real_bytes))
                        e.store(part, at, e.real_bytes)

                def long() -> None:
                    keep(e.sums(along(e, head_dim, [e.const(0.0)] * e.lanes, multiply)))

                def short() -> None:
                    """Rows of one vector: each product would be rounded before it is added."""
                    live = first_lanes(e, head_dim)
                    wide = ir.VectorType(DOUBLE, e.lanes)
                    q = [
                        b.fpext(vector_at(e, query_row(i), e.index(0), real, live), wide)
                        for i in range(rows)
                    ]
                    x = [
                        b.fpext(vector_at(e, row, e.index(0), self.key_dtype, live), wide)
                        for row in here
                    ]
                    products = e.sums([b.fmul(each, q[i]) for i in range(rows) for each in x])
                    keep(b.fptrunc(products, e.vector))

                def one_key() -> None:
                    """Its score is its lse, in which these sums would be all the error there is."""
                    wide = ir.VectorType(DOUBLE, e.lanes)

                    def multiply(d: Value, live: Value | None, old: list[Value]) -> list[Value]:
                        x = b.fpext(vector_at(e, here[0], d, self.key_dtype, live), wide)
                        q = [
                            b.fpext(vector_at(e, query_row(i), d, real, live), wide)
                            for i in range(rows)
                        ]
                        return [e.fma(x, *pair) for pair in zip(q, old, strict=True)]

                    zero = ir.Constant(wide, None)
                    totals = along(e, head_dim, [zero] * rows, multiply)
                    repeated = [total for total in totals for _ in range(keys)]
                    keep(b.fptrunc(e.sums(repeated), e.vector))

                if e.real == DOUBLE:
                    long()
                else:
                    is_short = e.below(head_dim, e.lanes + 1)
                    e.choose(is_short, short, lambda: e.choose(only, one_key, long))

            e.loop(0, count, keys, [], tile)
        return function

    # B = P V, O = rescale * O + B

    def values(self, rows: int) -> Value:
        """Add a segment of keys to `rows` rows of B."""
        e = self.e
        arguments = [*[POINTER] * 3, *[INT64] * 6]
        with e.function(f"values_{rows}", arguments) as (function, args):
            value, weights, block, value_row, block_row, v_head_dim, count, ahead, asked = args

            def tile(d: Value, live: Value | None, vectors: int) -> None:
                # Only the first columns prefetch, on behalf of all.
                mine = e.builder.select(e.below(0, d), e.index(0), asked)
                here = [
                    e.at(block, e.mul(i, block_row), e.mul(d, e.real_bytes), j * e.vector_bytes)
                    for i in range(rows)
                    for j in range(vectors)
                ]

                def add(k: Value, totals: list[Value]) -> list[Value]:
                    row, column = e.at(value, e.mul(k, value_row)), e.mul(k, e.real_bytes)
                    x = [
                        vector_at(e, row, e.add(d, j * e.lanes), self.value_dtype, live)
                        for j in range(vectors)
                    ]
                    self.fetch(row, ahead, mine)
                    following = []
                    for i in range(rows):
                        at = e.at(weights, i * self.score_row, column)
                        p = e.splat(e.load(at, e.real, e.real_bytes))
                        following += [
                            e.fma(p, x[j], totals[i * vectors + j]) for j in range(vectors)
                        ]
                    return following

                totals = e.loop(0, count, 1, [e.load_vector(at) for at in here], add)
                for at, total in zip(here, totals, strict=True):
                    e.store_vector(total, at)

            start, vectors = e.index(0), e.lanes // rows
            while vectors:

                def add_columns(d: Value, _: list[Value], vectors: int = vectors) -> None:
                    tile(d, None, vectors)

                step = vectors * e.lanes
                whole = e.round_down(v_head_dim, step)
                e.loop(start, whole, step, [], add_columns)
                start, vectors = whole, vectors // 2
            e.loop(
                whole, v_head_dim, e.lanes, [],
                lambda d, _: tile(d, first_lanes(e, e.sub(v_head_dim, d)), 1),
            )  # fmt: skip
        return function

    def selected_values(self) -> Value:
        """The same for one row and values not all finite: a weight of -0.0 adds nothing."""
        e = self.e
        arguments = [*[POINTER] * 3, *[INT64] * 3]
        with e.function("selected_values", arguments) as (function, args):
            value, weights, block, value_row, v_head_dim, count = args
            b = e.builder
            marked = e.as_bits(e.const(-0.0))

            def column(d: Value, live: Value | None, _: list[Value]) -> list[Value]:
                def add(k: Value, totals: list[Value]) -> list[Value]:
                    x = vector_at(e, e.at(value, e.mul(k, value_row)), d, self.value_dtype, live)
                    at = e.at(weights, e.mul(k, e.real_bytes))
                    p = e.splat(e.load(at, e.real, e.real_bytes))
                    allowed = b.icmp_signed("!=", e.as_bits(p), marked)
                    return [b.select(allowed, e.fma(p, x, totals[0]), totals[0])]

                at = e.at(block, e.mul(d, e.real_bytes))
                e.store_vector(e.loop(0, count, 1, [e.load_vector(at)], add)[0], at)
                return []

            along(e, v_head_dim, [], column)
        return function
