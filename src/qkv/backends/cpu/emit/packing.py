"""Rows of any dtype and stride, transposed into vectors of queries and back, or copied densely."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Emitter, Value


def adjacent(e: Emitter, element: Value, dim: Value, item: int) -> Value:
    """Whether rows can be read a vector at a time."""
    b = e.builder
    side_by_side = b.icmp_signed("==", element, e.index(item))
    return b.and_(side_by_side, b.icmp_signed(">=", dim, e.index(e.lanes)))


def pack_rows(
    e: Emitter,
    rows: Sequence[Value],
    element: Value,
    dim: Value,
    dtype: str,
    put: Callable[[Value, Value], None],
) -> None:
    """Transpose one row for each lane: `put(d, vector)` is given element d of every row."""
    item = storage.ITEM_BYTES[dtype]

    def transpose(d: Value, _: list[Value]) -> None:
        # The last vector may overlap the one before.
        d = e.least(d, e.sub(dim, e.lanes))
        loaded = [storage.load(e, e.at(row, e.mul(d, item)), dtype, e.lanes) for row in rows]
        for i, vector in enumerate(e.transpose(loaded)):
            put(e.add(d, i), vector)

    def gather(d: Value, _: list[Value]) -> None:
        vector = ir.Constant(e.vector, ir.Undefined)
        for i, row in enumerate(rows):
            x = storage.load(e, e.at(row, e.mul(d, element)), dtype)
            vector = e.insert(vector, x, i)
        put(d, vector)

    stop = e.builder.select(adjacent(e, element, dim, item), dim, e.index(0))
    e.loop(0, stop, e.lanes, [], transpose)
    e.loop(stop, dim, 1, [], gather)


def unpack_rows(
    e: Emitter, rows: Sequence[Value], dim: Value, dtype: str, take: Callable[[Value], Value]
) -> Value:
    """Transpose back: `take(d)` gives element d of every row; rows have adjacent elements.

    Gives a vector that is 0 only if all elements are finite, or NaN. For large finite ones it may
    be NaN too.
    """
    item = storage.ITEM_BYTES[dtype]
    b, zero = e.builder, e.const(0.0)

    def transpose(d: Value, seen: list[Value]) -> list[Value]:
        d = e.least(d, e.sub(dim, e.lanes))
        vectors = [take(e.add(d, i)) for i in range(e.lanes)]
        sums = vectors
        while len(sums) > 1:
            sums = list(map(b.fadd, sums[::2], sums[1::2]))
        for row, vector in zip(rows, e.transpose(vectors), strict=True):
            storage.store(e, vector, e.at(row, e.mul(d, item)), dtype)
        return [e.fma(sums[0], zero, seen[0])]

    def scatter(d: Value, seen: list[Value]) -> list[Value]:
        vector = take(d)
        for i, row in enumerate(rows):
            storage.store(e, e.extract(vector, i), e.at(row, e.mul(d, item)), dtype)
        return [e.fma(vector, zero, seen[0])]

    stop = b.select(adjacent(e, e.index(item), dim, item), dim, e.index(0))
    seen = e.loop(0, stop, e.lanes, [zero], transpose)
    (last,) = e.loop(stop, dim, 1, seen, scatter)
    return last


def copy_rows(e: Emitter, dtype: str) -> Value:
    """A function `(from, row, element, count, dim, to)`: rows side by side as `e.real`."""
    item = storage.ITEM_BYTES[dtype]
    with e.function(f"copy_{dtype}", [POINTER, *[INT64] * 4, POINTER]) as (function, args):
        source, row, element, count, dim, target = args
        b = e.builder
        stop = b.select(adjacent(e, element, dim, item), dim, e.index(0))

        def each(k: Value, _: list[Value]) -> None:
            start, end = e.at(source, e.mul(k, row)), e.at(target, e.mul(k, dim, e.real_bytes))

            def vector(d: Value, _: list[Value]) -> None:
                d = e.least(d, e.sub(dim, e.lanes))
                loaded = storage.load(e, e.at(start, e.mul(d, item)), dtype, e.lanes)
                e.store_vector(loaded, e.at(end, e.mul(d, e.real_bytes)), aligned=False)

            def scalar(d: Value, _: list[Value]) -> None:
                loaded = storage.load(e, e.at(start, e.mul(d, element)), dtype)
                e.store(loaded, e.at(end, e.mul(d, e.real_bytes)), e.real_bytes)

            e.loop(0, stop, e.lanes, [], vector)
            e.loop(stop, dim, 1, [], scalar)

        e.loop(0, count, 1, [], each)
    return function


def move_rows(e: Emitter, name: str, item: int) -> Value:
    """A function `(from, row, element, count, dim, to)`: rows of any stride laid side by side."""
    with e.function(f"move_{name}", [POINTER, *[INT64] * 4, POINTER]) as (function, args):
        source, row, element, count, dim, target = args
        raw = ir.IntType(8 * item)

        def each(k: Value, _: list[Value]) -> None:
            start, end = e.at(source, e.mul(k, row)), e.at(target, e.mul(k, dim, item))

            def one(d: Value, _: list[Value]) -> None:
                x = e.load(e.at(start, e.mul(d, element)), raw)
                e.store(x, e.at(end, e.mul(d, item)), item)

            e.loop(0, dim, 1, [], one)

        e.loop(0, count, 1, [], each)
    return function


def all_finite(e: Emitter, dtype: str = "") -> Value:
    """A function `(rows, row, count, dim) -> bit`: x * 0 is 0 exactly for a finite x."""
    dtype = dtype or storage.real_dtype(e)
    item = storage.ITEM_BYTES[dtype]
    with e.function("all_finite", [POINTER, *[INT64] * 3], BIT) as (function, args):
        source, row, count, dim = args
        b = e.builder
        last_row, last_vector = e.sub(count, 1), e.sub(dim, e.lanes)

        def rows(d: Value, load: Callable[[Value], Value], seen: list[Value]) -> list[Value]:
            def four_rows(k: Value, seen: list[Value]) -> list[Value]:
                # Four rows are read at a time; the last ones may be read twice.
                following = []
                for i, old in enumerate(seen):
                    place = e.mul(e.least(e.add(k, i), last_row), row)
                    x = load(e.at(source, place, e.mul(d, item)))
                    following.append(e.fma(x, ir.Constant(x.type, None), old))
                return following

            return e.loop(0, count, 4, seen, four_rows)

        wide = b.icmp_signed(">=", dim, e.index(e.lanes))
        stop = b.select(wide, dim, e.index(0))
        vectors = e.loop(
            0, stop, e.lanes, [e.const(0.0)] * 4,
            lambda d, seen: rows(
                e.least(d, last_vector), lambda p: storage.load(e, p, dtype, e.lanes), seen
            ),
        )  # fmt: skip
        scalars = e.loop(
            stop, dim, 1, [ir.Constant(e.real, 0.0)] * 4,
            lambda d, seen: rows(d, lambda p: storage.load(e, p, dtype), seen),
        )  # fmt: skip
        total = vectors[0]
        for seen in (*vectors[1:], *map(e.splat, scalars)):
            total = b.fadd(total, seen)
        lanes = ir.IntType(e.lanes)
        b.ret(b.icmp_unsigned("==", b.bitcast(e.is_nan(total), lanes), ir.Constant(lanes, 0)))
    return function
