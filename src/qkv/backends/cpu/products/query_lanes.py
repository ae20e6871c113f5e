"""The two matrix products of attention as register tiles, queries in lanes.

Matrices with a row for each key are read where they lie, their elements adjacent, one element at a
time, which is copied to all lanes. A row of a matrix *packed* for queries has `width` bytes, and
`vectors` neighbours of its vectors are multiplied. All sums are chains of multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import DOUBLE, Emitter, Value

MultiplyAdd = Callable[[Emitter, Value, Value, Value], Value]
MeansOfHalf = Callable[[int], list[Value]]
"""One vector of means for each vector of queries, for half 0 or half 1 of the products."""


def vectors_at(
    e: Emitter, pointer: Value, vectors: int, row: Value | int = 0, width: Value | int = 0
) -> list[Value]:
    """The vectors of one row of a packed matrix, or neighbours of a row of `width` bytes."""
    start = e.at(pointer, e.mul(row, width or vectors * e.vector_bytes))
    return [e.load_vector(e.at(start, j * e.vector_bytes)) for j in range(vectors)]


def store_vectors(e: Emitter, pointer: Value, values: Sequence[Value]) -> None:
    for n, value in enumerate(values):
        e.store_vector(value, e.at(pointer, n * e.vector_bytes))


def _accumulate(
    e: Emitter,
    factors: Iterable[Value],
    row: list[Value],
    totals: list[Value],
    multiply_add: MultiplyAdd = Emitter.fma,
) -> list[Value]:
    following = []
    for i, x in enumerate(factors):
        following += [
            multiply_add(e, x, vector, totals[i * len(row) + j]) for j, vector in enumerate(row)
        ]
    return following


def _in_all_lanes(e: Emitter, elements: Sequence[Value]) -> Iterator[Value]:
    """The elements at some addresses, each one in every lane."""
    for pointer in elements:
        yield e.splat(e.load(pointer, e.real, e.real_bytes))


def _neighbours_in_all_lanes(e: Emitter, first: Value, size: int) -> Iterable[Value]:
    """The same of neighbouring elements.

    Arm multiplies by any lane of a vector of 16 bytes. Of elements that are loaded one by one, LLVM
    copies some to all lanes, which takes one of the units that multiply.
    """
    if e.vector_bytes != 16 or size % e.lanes:
        return _in_all_lanes(e, [e.at(first, i * e.real_bytes) for i in range(size)])
    starts = range(0, size, e.lanes)
    vectors = [e.load_vector(e.at(first, i * e.real_bytes), aligned=False) for i in starts]
    masks = [e.shuffle_mask([lane] * e.lanes) for lane in range(e.lanes)]
    return [e.builder.shuffle_vector(vector, vector, mask) for vector in vectors for mask in masks]


class SumOrder(NamedTuple):
    """How the products of two rows are added up."""

    multiply_add: MultiplyAdd = Emitter.fma
    means_of_half: MeansOfHalf | None = None
    """Means to subtract after either half of the products. Sums of products less their means stay
    small, and so do rounding errors."""
    chain: int | None = None
    """Number of products in one chain, if the sums of several chains are added, because rounding
    errors grow with the length of a chain."""
    wide: bool = False
    """Whether products are added in float64 and rounded once."""
    width: int = 0
    """Bytes of a packed row, if only some of its vectors are multiplied."""


IN_ORDER = SumOrder()

Tile = Callable[[Emitter, Sequence[Value], Value, int, Value, SumOrder], list[Value]]
"""The products of some rows with a packed matrix, as `dot_tile` gives them."""


def dot_tile(
    e: Emitter,
    rows: Sequence[Value],
    packed: Value,
    vectors: int,
    count: Value,
    sums: SumOrder,
) -> list[Value]:
    """sum_d row[i][d] * packed[d][j], one vector for each row i and vector j."""
    b, multiply_add, means_of_half, chain, wide = e.builder, *sums[:4]
    total_type = ir.VectorType(DOUBLE, e.lanes) if wide else e.vector
    if wide:
        multiply_add = _multiply_add_wide

    def add_element(d: Value, totals: list[Value]) -> list[Value]:
        column = e.mul(d, e.real_bytes)
        elements = [e.at(row, column) for row in rows]
        row = vectors_at(e, packed, vectors, d, sums.width)
        return _accumulate(e, _in_all_lanes(e, elements), row, totals, multiply_add)

    def round_totals(totals: list[Value]) -> list[Value]:
        return [b.fptrunc(total, e.vector) for total in totals] if wide else totals

    def add_chain(start: Value, stop: Value, totals: list[Value]) -> list[Value]:
        part = e.loop(start, stop, 1, zeros, add_element)
        return [b.fadd(*pair) for pair in zip(totals, part, strict=True)]

    zeros = totals = [ir.Constant(total_type, None)] * (len(rows) * vectors)
    if chain is not None:
        whole = e.round_down(count, chain)
        totals = e.loop(0, whole, chain, totals, lambda d, old: add_chain(d, e.add(d, chain), old))
        return round_totals(add_chain(whole, count, totals))
    return round_totals(add_in_halves(e, count, totals, add_element, means_of_half))


def add_in_halves(
    e: Emitter,
    count: Value,
    totals: list[Value],
    add_term: Callable[[Value, list[Value]], list[Value]],
    means_of_half: MeansOfHalf | None,
) -> list[Value]:
    """Add `count` terms to the totals; after either half of them, subtract its means, if any."""
    if means_of_half is None:
        return e.loop(0, count, 1, totals, add_term)
    for half, (start, stop) in enumerate(half_ranges(e, count)):
        totals, means = e.loop(start, stop, 1, totals, add_term), means_of_half(half)
        if means[0].type != totals[0].type:
            means = [e.builder.fpext(mean, totals[0].type) for mean in means]
        totals = [e.builder.fsub(t, means[n % len(means)]) for n, t in enumerate(totals)]
    return totals


def _multiply_add_wide(e: Emitter, x: Value, y: Value, total: Value) -> Value:
    """Products of two float32 are exact in float64."""
    return e.fma(e.builder.fpext(x, total.type), e.builder.fpext(y, total.type), total)


def half_ranges(e: Emitter, count: Value) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
    """Where both halves of `count` products begin and end."""
    middle = e.builder.sdiv(count, e.index(2))
    return (e.index(0), middle), (middle, count)


def dot_rows(
    e: Emitter,
    first_row: Value,
    row_stride: Value,
    count: Value,
    packed: Value,
    vectors: int,
    dim: Value,
    keys: int,
    carried: list[Value],
    finish: Callable[[Value, list[Value], list[Value]], list[Value]],
    sums: SumOrder = IN_ORDER,
    tile: Tile = dot_tile,
) -> list[Value]:
    """A tile for all `count` rows, `keys` of them at a time.

    `finish(k, products, carried)` is given the rows from k on, `vectors` products for each.
    """

    def multiply_rows(size: int) -> Callable[[Value, list[Value]], list[Value]]:
        def multiply_from(k: Value, carried: list[Value]) -> list[Value]:
            rows = [e.at(first_row, e.mul(e.add(k, i), row_stride)) for i in range(size)]
            products = tile(e, rows, packed, vectors, dim, sums)
            return finish(k, products, carried)

        return multiply_from

    start = e.index(0)
    # Two rows before single ones: with few sums, each multiply-add waits for the one before it.
    for size in (keys, 2, 1) if keys > 4 else (keys, 1):
        stop = e.add(start, e.round_down(e.sub(count, start), size))
        carried = e.loop(start, stop, size, carried, multiply_rows(size))
        start = stop
    return carried


def combine_rows(
    e: Emitter,
    first_row: Value,
    row_stride: Value,
    count: Value,
    packed: Value,
    vectors: int,
    dim: Value,
    columns: int,
    finish: Callable[[Value, list[Value]], None],
    width: Value | int = 0,
    multiply_add: MultiplyAdd = Emitter.fma,
) -> None:
    """sum_k row[k][d] * packed[k][j] for all columns d, `columns` of them at a time.

    `finish(d, sums)` is given the columns from d on, `vectors` sums for each.
    """

    def sum_columns(d: Value, size: int) -> list[Value]:
        start = e.at(first_row, e.mul(d, e.real_bytes))

        def add_row(k: Value, totals: list[Value]) -> list[Value]:
            row = e.at(start, e.mul(k, row_stride))
            factors = _neighbours_in_all_lanes(e, row, size)
            vectors_of_row = vectors_at(e, packed, vectors, k, width)
            return _accumulate(e, factors, vectors_of_row, totals, multiply_add)

        return e.loop(0, count, 1, [e.const(0.0)] * (size * vectors), add_row)

    whole = e.round_down(dim, columns)
    e.loop(0, whole, columns, [], lambda d, _: finish(d, sum_columns(d, columns)))
    b = e.builder
    is_rest, is_wide = e.below(whole, dim), b.icmp_signed(">=", dim, e.index(columns))

    def finish_last_tile() -> None:
        # This tile ends with the last column; the columns that are already finished are dropped.
        d = e.sub(dim, columns)
        totals = sum_columns(d, columns)
        for i in range(columns):
            column = e.add(d, i)
            with b.if_then(b.icmp_signed(">=", column, whole)):
                finish(column, totals[i * vectors : (i + 1) * vectors])

    def finish_each_column() -> None:
        e.loop(0, dim, 1, [], lambda d, _: finish(d, sum_columns(d, 1)))

    with b.if_then(is_rest):
        e.choose(is_wide, finish_last_tile, finish_each_column)
