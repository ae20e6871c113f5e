"""The two matrix products of attention as register tiles, queries in lanes.

Matrices with a row for each key lie as they are in memory, their elements adjacent; they are read
one element at a time and spread over the lanes. Matrices *packed* for queries hold, for each row,
`vectors` vectors of queries, or that many beside others: `across` in all. All sums are chains of
multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import DOUBLE, Emitter, Value

MultiplyAdd = Callable[[Emitter, Value, Value, Value], Value]
Less = Callable[[int], list[Value]]
"""Gives one vector of means for each vector of queries, for the first or the second half."""


def vectors_at(
    e: Emitter, pointer: Value, vectors: int, row: Value | int = 0, across: int | None = None
) -> list[Value]:
    """The vectors of one row of a packed matrix, or neighbours of its `across` vectors."""
    start = e.at(pointer, e.mul(row, (across or vectors) * e.vector_bytes))
    return [e.load_vector(e.at(start, j * e.vector_bytes)) for j in range(vectors)]


def store_vectors(e: Emitter, pointer: Value, values: Sequence[Value]) -> None:
    for n, value in enumerate(values):
        e.store_vector(value, e.at(pointer, n * e.vector_bytes))


def _accumulate(
    e: Emitter,
    elements: Sequence[Value],
    row: list[Value],
    totals: list[Value],
    multiply_add: MultiplyAdd = Emitter.fma,
) -> list[Value]:
    following = []
    for i, pointer in enumerate(elements):
        x = e.splat(e.load(pointer, e.real, e.real_bytes))
        following += [
            multiply_add(e, x, vector, totals[i * len(row) + j]) for j, vector in enumerate(row)
        ]
    return following


class SumOrder(NamedTuple):
    """How the products of two rows are added up."""

    multiply_add: MultiplyAdd = Emitter.fma
    less: Less | None = None
    """Gives what is taken from the sum of each half of the products. Where that is their mean,
    sums stay small, and their rounding errors too."""
    chain: int | None = None
    """Number of products that are added one after the other before these sums are added, because
    rounding errors grow with the length of a chain."""
    wide: bool = False
    """Whether products are added in float64 and rounded once."""
    across: int | None = None
    """Vectors of a packed row, if only some of them are multiplied."""


_IN_ORDER = SumOrder()


def dot_tile(
    e: Emitter,
    rows: Sequence[Value],
    packed: Value,
    vectors: int,
    count: Value,
    sums: SumOrder = _IN_ORDER,
) -> list[Value]:
    """sum_d row[i][d] * packed[d][j], one vector for each row i and vector j."""
    b, multiply_add, less, chain, wide = e.builder, *sums[:4]
    total_type = ir.VectorType(DOUBLE, e.lanes) if wide else e.vector
    if wide:
        multiply_add = _multiply_add_wide

    def step(d: Value, totals: list[Value]) -> list[Value]:
        column = e.mul(d, e.real_bytes)
        elements = [e.at(row, column) for row in rows]
        row = vectors_at(e, packed, vectors, d, sums.across)
        return _accumulate(e, elements, row, totals, multiply_add)

    def rounded(totals: list[Value]) -> list[Value]:
        return [b.fptrunc(total, e.vector) for total in totals] if wide else totals

    def link(start: Value, stop: Value, totals: list[Value]) -> list[Value]:
        part = e.loop(start, stop, 1, zeros, step)
        return [b.fadd(*pair) for pair in zip(totals, part, strict=True)]

    zeros = totals = [ir.Constant(total_type, None)] * (len(rows) * vectors)
    if chain is not None:
        whole = e.round_down(count, chain)
        totals = e.loop(0, whole, chain, totals, lambda d, old: link(d, e.add(d, chain), old))
        return rounded(link(whole, count, totals))
    if less is None:
        return rounded(e.loop(0, count, 1, totals, step))
    for part, (start, stop) in enumerate(halves(e, count)):
        totals, means = e.loop(start, stop, 1, totals, step), less(part)
        if wide:
            means = [b.fpext(mean, total_type) for mean in means]
        totals = [b.fsub(t, means[n % vectors]) for n, t in enumerate(totals)]
    return rounded(totals)


def _multiply_add_wide(e: Emitter, x: Value, y: Value, total: Value) -> Value:
    """Products of two float32 are exact in float64."""
    return e.fma(e.builder.fpext(x, total.type), e.builder.fpext(y, total.type), total)


def halves(e: Emitter, count: Value) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
    """Where either half of a sum begins and ends."""
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
    sums: SumOrder = _IN_ORDER,
) -> list[Value]:
    """`dot_tile` for all `count` rows, `keys` of them at a time.

    `finish(k, products, carried)` is given the rows from k on, `vectors` products for each.
    """

    def tile(size: int) -> Callable[[Value, list[Value]], list[Value]]:
        def body(k: Value, carried: list[Value]) -> list[Value]:
            rows = [e.at(first_row, e.mul(e.add(k, i), row_stride)) for i in range(size)]
            products = dot_tile(e, rows, packed, vectors, dim, sums)
            return finish(k, products, carried)

        return body

    start = e.index(0)
    # The sums of a single row are too few: each multiply-add would wait for an earlier one.
    for size in (keys, 2, 1) if keys > 4 else (keys, 1):
        stop = e.add(start, e.round_down(e.sub(count, start), size))
        carried = e.loop(start, stop, size, carried, tile(size))
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
    across: int | None = None,
) -> None:
    """sum_k row[k][d] * packed[k][j] for all columns d, `columns` of them at a time.

    `finish(d, sums)` is given the columns from d on, `vectors` sums for each.
    """

    def sums(d: Value, size: int) -> list[Value]:
        start = e.at(first_row, e.mul(d, e.real_bytes))

        def step(k: Value, totals: list[Value]) -> list[Value]:
            row = e.at(start, e.mul(k, row_stride))
            elements = [e.at(row, i * e.real_bytes) for i in range(size)]
            return _accumulate(e, elements, vectors_at(e, packed, vectors, k, across), totals)

        return e.loop(0, count, 1, [e.const(0.0)] * (size * vectors), step)

    whole = e.round_down(dim, columns)
    e.loop(0, whole, columns, [], lambda d, _: finish(d, sums(d, columns)))
    b = e.builder
    some, wide = e.below(whole, dim), b.icmp_signed(">=", dim, e.index(columns))

    def last() -> None:
        # A tile that ends with the last column; those it has in common with the one before are
        # dropped.
        d = e.sub(dim, columns)
        totals = sums(d, columns)
        for i in range(columns):
            column = e.add(d, i)
            with b.if_then(b.icmp_signed(">=", column, whole)):
                finish(column, totals[i * vectors : (i + 1) * vectors])

    def narrow() -> None:
        e.loop(0, dim, 1, [], lambda d, _: finish(d, sums(d, 1)))

    with b.if_then(some):
        e.choose(wide, last, narrow)
