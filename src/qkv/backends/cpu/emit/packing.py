"""Rows of any dtype and stride, transposed into vectors of queries and back, or copied densely."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Emitter, Value


def can_load_vectors(e: Emitter, element: Value, dim: Value, item: int) -> Value:
    """Whether elements of a row are adjacent, and enough to fill a vector."""
    b = e.builder
    side_by_side = b.icmp_signed("==", element, e.index(item))
    return b.and_(side_by_side, b.icmp_signed(">=", dim, e.index(e.lanes)))


def pack_rows(
    e: Emitter,
    rows: Sequence[Value],
    element: Value,
    dim: Value,
    dtype: str,
    store: Callable[[Value, Value], None],
) -> None:
    """Transpose one row for each lane: `store(d, vector)` is given element d of every row."""
    item = storage.ITEM_BYTES[dtype]

    def transpose_vectors(d: Value, _: list[Value]) -> None:
        # The last vector ends with the row, so it may repeat elements of the vector before it.
        d = e.least(d, e.sub(dim, e.lanes))
        loaded = [storage.load(e, e.at(row, e.mul(d, item)), dtype, e.lanes) for row in rows]
        for i, vector in enumerate(e.transpose(loaded)):
            store(e.add(d, i), vector)

    def gather_element(d: Value, _: list[Value]) -> None:
        vector = ir.Constant(e.vector, ir.Undefined)
        for i, row in enumerate(rows):
            x = storage.load(e, e.at(row, e.mul(d, element)), dtype)
            vector = e.insert(vector, x, i)
        store(d, vector)

    stop = e.builder.select(can_load_vectors(e, element, dim, item), dim, e.index(0))
    e.loop(0, stop, e.lanes, [], transpose_vectors)
    e.loop(stop, dim, 1, [], gather_element)


def unpack_rows(
    e: Emitter, rows: Sequence[Value], dim: Value, dtype: str, load: Callable[[Value], Value]
) -> Value:
    """Transpose back: `load(d)` gives element d of every row; rows have adjacent elements.

    Gives a vector of zeros, with a NaN in some lane if any element is infinite or NaN, or if sums
    of large finite elements overflow.
    """
    item = storage.ITEM_BYTES[dtype]
    b, zero = e.builder, e.const(0.0)

    def transpose_vectors(d: Value, seen: list[Value]) -> list[Value]:
        d = e.least(d, e.sub(dim, e.lanes))
        vectors = [load(e.add(d, i)) for i in range(e.lanes)]
        sums = vectors
        while len(sums) > 1:
            sums = list(map(b.fadd, sums[::2], sums[1::2]))
        for row, vector in zip(rows, e.transpose(vectors), strict=True):
            storage.store(e, vector, e.at(row, e.mul(d, item)), dtype)
        return [e.fma(sums[0], zero, seen[0])]

    def scatter_element(d: Value, seen: list[Value]) -> list[Value]:
        vector = load(d)
        for i, row in enumerate(rows):
            storage.store(e, e.extract(vector, i), e.at(row, e.mul(d, item)), dtype)
        return [e.fma(vector, zero, seen[0])]

    stop = b.select(can_load_vectors(e, e.index(item), dim, item), dim, e.index(0))
    seen = e.loop(0, stop, e.lanes, [zero], transpose_vectors)
    (last,) = e.loop(stop, dim, 1, seen, scatter_element)
    return last


def copy_rows_function(e: Emitter, dtype: str, to: str = "") -> Value:
    """A function `(from, row, element, count, dim, to)` that copies rows as type `to`.

    `row` and `element` are byte strides in `from`; the copies are dense, and of `e.real` if no type
    is named.
    """
    to = to or storage.real_dtype(e)
    item, to_item = storage.ITEM_BYTES[dtype], storage.ITEM_BYTES[to]
    with e.function(f"copy_{dtype}", [POINTER, *[INT64] * 4, POINTER]) as (function, args):
        source, row, element, count, dim, target = args
        b = e.builder
        stop = b.select(can_load_vectors(e, element, dim, item), dim, e.index(0))

        def copy_row(k: Value, _: list[Value]) -> None:
            start, end = e.at(source, e.mul(k, row)), e.at(target, e.mul(k, dim, to_item))

            def copy_vector(d: Value, _: list[Value]) -> None:
                d = e.least(d, e.sub(dim, e.lanes))
                loaded = storage.load(e, e.at(start, e.mul(d, item)), dtype, e.lanes)
                storage.store(e, loaded, e.at(end, e.mul(d, to_item)), to)

            def copy_element(d: Value, _: list[Value]) -> None:
                loaded = storage.load(e, e.at(start, e.mul(d, element)), dtype)
                storage.store(e, loaded, e.at(end, e.mul(d, to_item)), to)

            e.loop(0, stop, e.lanes, [], copy_vector)
            e.loop(stop, dim, 1, [], copy_element)

        e.loop(0, count, 1, [], copy_row)
    return function


def move_rows_function(e: Emitter, name: str, item: int) -> Value:
    """A function of the same arguments as that of `copy_rows_function`, without widening."""
    with e.function(f"move_{name}", [POINTER, *[INT64] * 4, POINTER]) as (function, args):
        source, row, element, count, dim, target = args
        raw = ir.IntType(8 * item)

        def move_row(k: Value, _: list[Value]) -> None:
            start, end = e.at(source, e.mul(k, row)), e.at(target, e.mul(k, dim, item))

            def move_element(d: Value, _: list[Value]) -> None:
                x = e.load(e.at(start, e.mul(d, element)), raw)
                e.store(x, e.at(end, e.mul(d, item)), item)

            e.loop(0, dim, 1, [], move_element)

        e.loop(0, count, 1, [], move_row)
    return function


def all_finite_function(e: Emitter, dtype: str = "") -> Value:
    """A function `(rows, row, count, dim)`: whether all elements are finite.

    x * 0 is 0 for a finite x, and NaN for any other.
    """
    dtype = dtype or storage.real_dtype(e)
    item = storage.ITEM_BYTES[dtype]
    with e.function("all_finite", [POINTER, *[INT64] * 3], BIT) as (function, args):
        source, row, count, dim = args
        b = e.builder
        last_row, last_vector = e.sub(count, 1), e.sub(dim, e.lanes)

        def add_column(d: Value, load: Callable[[Value], Value], seen: list[Value]) -> list[Value]:
            def add_four_rows(k: Value, seen: list[Value]) -> list[Value]:
                # Beyond the last row, the last row is read again.
                following = []
                for i, old in enumerate(seen):
                    place = e.mul(e.least(e.add(k, i), last_row), row)
                    x = load(e.at(source, place, e.mul(d, item)))
                    following.append(e.fma(x, ir.Constant(x.type, None), old))
                return following

            return e.loop(0, count, 4, seen, add_four_rows)

        wide = b.icmp_signed(">=", dim, e.index(e.lanes))
        stop = b.select(wide, dim, e.index(0))
        vectors = e.loop(
            0, stop, e.lanes, [e.const(0.0)] * 4,
            lambda d, seen: add_column(
                e.least(d, last_vector), lambda p: storage.load(e, p, dtype, e.lanes), seen
            ),
        )  # fmt: skip
        scalars = e.loop(
            stop, dim, 1, [ir.Constant(e.real, 0.0)] * 4,
            lambda d, seen: add_column(d, lambda p: storage.load(e, p, dtype), seen),
        )  # fmt: skip
        total = vectors[0]
        for seen in (*vectors[1:], *map(e.splat, scalars)):
            total = b.fadd(total, seen)
        lanes = ir.IntType(e.lanes)
        b.ret(b.icmp_unsigned("==", b.bitcast(e.is_nan(total), lanes), ir.Constant(lanes, 0)))
    return function
