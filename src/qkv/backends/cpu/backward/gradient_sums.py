"""Products of the backward pass that add one block of queries and keys to dQ, dV and dK."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Emitter, Value
from qkv.backends.cpu.emit.forbidden_pairs import is_forbidden
from qkv.backends.cpu.products.bfloat16 import join_pairs, round_both
from qkv.backends.cpu.products.query_lanes import combine_rows, dot_rows, store_vectors, vectors_at

# dQ += dX^T K, transposed


def query_sums_function(frame: BackwardFrame, vectors: int) -> Value:
    """Add one block of keys to dQ; `grads` is dX, or dX packed with keys as elements."""
    e = frame.e
    arguments = [*[POINTER] * 4, *[INT64] * 3]
    with e.function(f"query_sums_{vectors}", arguments) as (function, args):
        key, grads, _, sums, key_row, head_dim, count = args

        def add_column(d: Value, column: list[Value]) -> None:
            add_vectors(e, e.at(sums, e.mul(d, vectors * e.vector_bytes)), column)

        if frame.in_pairs:
            factor = frame.packed_pairs(vectors)
            factor.combine_rows(key, key_row, count, grads, head_dim, add_column)
            return function
        columns = frame.shape.keys_of(vectors)
        combine_rows(e, key, key_row, count, grads, vectors, head_dim, columns, add_column)
    return function


def selected_query_sums_function(frame: BackwardFrame, vectors: int) -> Value:
    """Add keys that are not all finite, without forbidden pairs, where 0 * inf would be NaN."""
    e = frame.e
    arguments = [*[POINTER] * 4, *[INT64] * 3]
    with e.function(f"selected_query_sums_{vectors}", arguments) as (function, args):
        key, grads, weights, sums, key_row, head_dim, count = args
        b = e.builder

        def add_column(d: Value, _: list[Value]) -> None:
            start = e.at(key, e.mul(d, e.real_bytes))

            def add_key(k: Value, totals: list[Value]) -> list[Value]:
                x = e.splat(e.load(e.at(start, e.mul(k, key_row)), e.real, e.real_bytes))
                x = frame.not_among_products(x)
                pairs = zip(
                    vectors_at(e, grads, vectors, k),
                    vectors_at(e, weights, vectors, k),
                    totals,
                    strict=True,
                )
                return [
                    b.select(is_forbidden(e, weight), old, e.fma(x, grad, old))
                    for grad, weight, old in pairs
                ]

            column = e.loop(0, count, 1, [e.const(0.0)] * vectors, add_key)
            add_vectors(e, e.at(sums, e.mul(d, vectors * e.vector_bytes)), column)

        e.loop(0, head_dim, 1, [], add_column)
    return function


def add_vectors(e: Emitter, place: Value, vectors: list[Value]) -> None:
    """Add to neighbouring vectors in memory."""
    for n, vector in enumerate(vectors):
        at = e.at(place, n * e.vector_bytes)
        old = e.load_vector(at, aligned=False)
        e.store_vector(e.builder.fadd(old, vector), at, aligned=False)


# P and dX as bfloat16


def round_pairs_function(frame: BackwardFrame, vectors: int) -> Value:
    """Rounds P and dX to bfloat16: rows of queries of both, and dX packed for dQ, keys in pairs.

    A function `(weights, score_grads, count, weight_rows, grad_rows, packed)`. In packed dX, keys
    from `count` on are 0.
    """
    e, factor = frame.e, frame.packed_pairs(vectors)
    arguments = [*[POINTER] * 2, INT64, *[POINTER] * 3]
    with e.function(f"round_pairs_{vectors}", arguments) as (function, args):
        weights, score_grads, count, weight_rows, grad_rows, packed = args
        row, size = factor.width, factor.elements

        def round_term(k: Value, _: list[Value]) -> None:
            place = e.mul(k, row)
            rows = [vectors_at(e, e.at(score_grads, place), vectors, n) for n in range(size)]
            of_weights = vectors_at(e, e.at(weights, place), size * vectors)
            of_grads = [vector for row_of_key in rows for vector in row_of_key]
            for found, to in ((of_weights, weight_rows), (of_grads, grad_rows)):
                both = [round_both(e, *found[n : n + 2]) for n in range(0, len(found), 2)]
                store_vectors(e, e.at(to, e.mul(k, row // 2)), both)
            for j, column in enumerate(zip(*rows, strict=True)):
                pairs = [join_pairs(e, *column[n : n + 2]) for n in range(0, size, 2)]
                for n, vector in enumerate(factor.packed_rows(pairs)):
                    to = e.at(packed, e.mul(k, row // 2), n * row + j * e.vector_bytes)
                    e.store_vector(vector, to)

        end = e.round_down(e.add(count, size - 1), size)
        e.clear(score_grads, e.mul(count, row), e.mul(end, row))
        e.loop(0, end, size, [], round_term)
    return function


# dV += (f P) dO and dK += dX Q


def _column_at(frame: BackwardFrame, width: Value, v: Value, columns: Value) -> tuple[Value, Value]:
    """Where vector v of transposed rows lies: its byte offset in row 0, and bytes between rows.

    As many neighbouring vectors as fit the registers are the columns of one matrix; vectors that
    are left over are matrices of one column. `width` is that of a packed row.
    """
    e, b = frame.e, frame.e.builder
    vectors = frame.shape.vectors
    beside = b.srem(v, e.index(vectors))
    start = e.add(e.mul(e.sub(v, beside), e.lanes, width), e.mul(beside, e.vector_bytes))
    among = e.below(v, e.round_down(columns, vectors))
    return (
        b.select(among, start, e.mul(v, e.lanes, width)),
        b.select(among, e.index(vectors * e.vector_bytes), e.index(e.vector_bytes)),
    )


def transpose_function(frame: BackwardFrame) -> Value:
    """Rows that were packed lie side by side again, for products over queries."""
    e = frame.e
    with e.function("transpose", [POINTER, POINTER, INT64, INT64]) as (function, args):
        packed, out, columns, width = args

        def transpose_column(v: Value, _: list[Value]) -> None:
            start, row = _column_at(frame, width, v, columns)
            first = e.at(packed, e.mul(v, e.lanes, width))

            def transpose_tile(offset: Value, _: list[Value]) -> None:
                tile = [e.load_vector(e.at(first, e.mul(i, width), offset)) for i in range(e.lanes)]
                query = e.builder.sdiv(offset, e.index(e.real_bytes))
                for i, vector in enumerate(e.transpose(tile)):
                    to = e.at(out, start, e.mul(row, e.add(query, i)))
                    e.store_vector(vector, to)

            e.loop(0, width, e.vector_bytes, [], transpose_tile)

        e.loop(0, columns, 1, [], transpose_column)
    return function


def key_sums_function(frame: BackwardFrame) -> Value:
    """sums[k, :] += sum_q left[k, q] * rows[q, :], for rows q from `first_row` on.

    `left` begins with the column of that row, `rows` with the first row of the block. Rows of the
    left factor have `width` bytes. Both are float32, or pairs of queries.
    """
    e = frame.e
    arguments = [*[POINTER] * 3, *[INT64] * 6]
    with e.function("key_sums", arguments) as (function, args):
        left, rows, sums, sum_row, columns, count, first_row, row_count, width = args

        def adding_tiles(vectors: int, keys: int) -> Callable[[Value, list[Value]], None]:
            def add_tiles(v: Value, _: list[Value]) -> None:
                first = e.at(sums, e.mul(v, e.vector_bytes))

                def add_key(k: Value, totals: list[Value], _: list[Value]) -> list[Value]:
                    for i in range(0, len(totals), vectors):
                        row = e.mul(e.add(k, i // vectors), sum_row)
                        add_vectors(e, e.at(first, row), totals[i : i + vectors])
                    return []

                item = 2 if frame.in_pairs else e.real_bytes
                before = e.mul(first_row, vectors * e.lanes * item)
                matrix = e.at(rows, e.mul(v, e.lanes, width), before)
                if frame.in_pairs:
                    frame.dot_rows(left, width, count, matrix, vectors, row_count, add_key)
                    return
                dot_rows(e, left, width, count, matrix, vectors, row_count, keys, [], add_key)

            return add_tiles

        vectors, keys = frame.shape.vectors, frame.shape.keys
        whole = e.round_down(columns, vectors)
        e.loop(0, whole, vectors, [], adding_tiles(vectors, keys))
        if vectors > 1:
            e.loop(whole, columns, 1, [], adding_tiles(1, keys * vectors))
    return function


def selected_key_sums_function(frame: BackwardFrame) -> Value:
    """`key_sums_function` for rows that are not all finite, without forbidden pairs."""
    e = frame.e
    arguments = [*[POINTER] * 4, *[INT64] * 5]
    with e.function("selected_key_sums", arguments) as (function, args):
        left, rows, weights, sums, sum_row, columns, count, row_count, width = args
        b = e.builder
        forbidden = ir.Constant(e.real_bits, 1 << 8 * e.real_bytes - 1)

        def add_column(v: Value, _: list[Value]) -> None:
            start, row = _column_at(frame, width, v, columns)

            def add_key(k: Value, _: list[Value]) -> None:
                across = e.mul(k, width)

                def add_query(q: Value, totals: list[Value]) -> list[Value]:
                    at = e.add(across, e.mul(q, e.real_bytes))
                    bits = e.load(e.at(weights, at), e.real_bits, e.real_bytes)
                    x = e.splat(e.load(e.at(left, at), e.real, e.real_bytes))
                    vector = e.load_vector(e.at(rows, start, e.mul(q, row)))
                    vector = frame.not_among_products(vector)
                    allowed = b.icmp_unsigned("!=", bits, forbidden)
                    return [b.select(allowed, e.fma(x, vector, totals[0]), totals[0])]

                key_sums = e.loop(0, row_count, 1, [e.const(0.0)], add_query)
                place = e.at(sums, e.mul(k, sum_row), e.mul(v, e.vector_bytes))
                add_vectors(e, place, key_sums)

            e.loop(0, count, 1, [], add_key)

        e.loop(0, columns, 1, [], add_column)
    return function
