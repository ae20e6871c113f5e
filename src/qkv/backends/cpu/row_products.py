"""The two matrix products of attention as register tiles, lanes along head_dim.

K and V are read as they lie, rows with adjacent elements of any type, a vector at a time. Each
vector of them meets several rows of Q, so that it is loaded and widened once. A product of two rows
leaves its sum spread over the lanes; as many as there are lanes are then added up together.
Matrices of scores have `score_row` bytes from row to row of Q, one element for each key.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from qkv.backends.cpu import storage
from qkv.backends.cpu.ir import CACHE_LINE, DOUBLE, INT32, INT64, POINTER, Emitter, Value

_AHEAD = {True: 12 * 1024, False: 16 * 1024}
"""How many bytes ahead of its use a row is fetched, into the nearest cache or into the next."""
_ROWS_AHEAD = 64
"""How many rows at most: as many as keys of a block."""


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
        self, e: Emitter, key_dtype: str, value_dtype: str, score_row: int, *, nearest: bool
    ) -> None:
        self.e = e
        self.nearest = nearest
        """Whether rows are fetched into the nearest cache."""
        self.key_dtype, self.value_dtype = key_dtype, value_dtype
        self.score_row = score_row
        self.tiles = [rows for rows in (4, 2, 1) if rows <= e.lanes]
        """Rows of Q that a tile multiplies at once."""

    def ahead(self, row: Value, size: Value) -> Value:
        """Byte distance of the row to fetch, where rows have `size` bytes."""
        e = self.e
        rows = e.builder.sdiv(e.index(_AHEAD[self.nearest]), e.greater(size, 1))
        return e.mul(row, e.least(e.greater(rows, 1), _ROWS_AHEAD))

    # S = Q K^T

    def scores(self, rows: int) -> Value:
        """S of `rows` rows of Q with a segment of keys."""
        e, item = self.e, storage.ITEM_BYTES[self.key_dtype]
        keys = e.lanes // rows
        arguments = [*[POINTER] * 3, *[INT64] * 3]
        with e.function(f"scores_{rows}", arguments) as (function, args):
            key, query, out, key_row, head_dim, count = args
            b, real = e.builder, storage.real_dtype(e)
            ahead = self.ahead(key_row, e.mul(head_dim, item))

            def query_row(i: int) -> Value:
                return e.at(query, e.mul(i, head_dim, e.real_bytes))

            def tile(k: Value, _: list[Value]) -> None:
                here = [
                    e.at(key, e.mul(e.least(e.add(k, j), e.sub(count, 1)), key_row))
                    for j in range(keys)
                ]

                def multiply(d: Value, live: Value | None, totals: list[Value]) -> list[Value]:
                    q = [vector_at(e, query_row(i), d, real, live) for i in range(rows)]
                    totals = list(totals)
                    for j, row in enumerate(here):
                        x = vector_at(e, row, d, self.key_dtype, live)
                        e.prefetch(e.at(row, ahead, e.mul(d, item)), soon=self.nearest)
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

                if e.real == DOUBLE:
                    long()
                else:
                    e.choose(e.below(head_dim, e.lanes + 1), short, long)

            e.loop(0, count, keys, [], tile)
        return function

    # B = P V, O = rescale * O + B

    def values(self, rows: int) -> Value:
        """Add a segment of keys to `rows` rows of B."""
        e, item = self.e, storage.ITEM_BYTES[self.value_dtype]
        arguments = [*[POINTER] * 3, *[INT64] * 4]
        with e.function(f"values_{rows}", arguments) as (function, args):
            value, weights, block, value_row, block_row, v_head_dim, count = args
            ahead = self.ahead(value_row, e.mul(v_head_dim, item))

            def tile(d: Value, live: Value | None, vectors: int) -> None:
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
                    later = e.at(row, ahead, e.mul(d, item))
                    for line in range(0, vectors * e.lanes * item, CACHE_LINE):
                        e.prefetch(e.at(later, line), soon=self.nearest)
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

            most = e.lanes // rows
            step = most * e.lanes
            start = e.round_down(v_head_dim, step)
            e.loop(0, start, step, [], lambda d, _: tile(d, None, most))
            whole = e.round_down(v_head_dim, e.lanes)
            e.loop(start, whole, e.lanes, [], lambda d, _: tile(d, None, 1))
            e.loop(
                whole, v_head_dim, e.lanes, [],
                lambda d, _: tile(d, first_lanes(e, e.sub(v_head_dim, d)), 1),
            )  # fmt: skip
        return function

    def selected_values(self) -> Value:
        """The same for one row and values not all finite: a weight of -0.0 adds nothing."""
        e = self.e
        arguments = [*[POINTER] * 3, *[INT64] * 4]
        with e.function("selected_values", arguments) as (function, args):
            value, weights, block, value_row, _, v_head_dim, count = args
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
