"""The two products of the forward kernel, over one block of keys."""

from __future__ import annotations

import math

from qkv.backends.cpu.emit.emitter import CACHE_LINE, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.emit.forbidden_pairs import forbidden_bits, is_allowed
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.products.query_lanes import (
    SumOrder,
    combine_rows,
    dot_rows,
    store_vectors,
    vectors_at,
)


def scores_function(frame: ForwardFrame, vectors: int) -> Value:
    """S[k, :] = K[k, :] . packed Q, and each query's largest score.

    Rows of V are prefetched here, a few at a time, because V is read by columns afterwards.
    """
    e = frame.e
    arguments = [*[POINTER] * 5, *[INT64] * 5]
    with e.function(f"scores_{vectors}", arguments) as (function, args):
        key, packed, out, block_max, value, key_row, head_dim, count, value_row, v_head_dim = args
        row_bytes = e.mul(v_head_dim, e.real_bytes)

        def prefetch_row(row: Value) -> None:
            e.loop(
                0, row_bytes, CACHE_LINE, [],
                lambda offset, _: e.prefetch(e.at(row, offset)),
            )  # fmt: skip

        def store_scores(k: Value, products: list[Value], largest: list[Value]) -> list[Value]:
            for i in range(len(products) // vectors):
                prefetch_row(e.at(value, e.mul(e.add(k, i), value_row)))
            store_vectors(e, e.at(out, e.mul(k, vectors * e.vector_bytes)), products)
            largest = list(largest)
            for n, product in enumerate(products):
                largest[n % vectors] = e.greatest(largest[n % vectors], product)
            return largest

        lowest = [e.const(-math.inf)] * vectors
        largest = dot_rows(
            e, key, key_row, count, packed, vectors, head_dim, frame.shape.keys_of(vectors),
            lowest, store_scores, SumOrder(wide=frame.shape.wide),
        )  # fmt: skip
        store_vectors(e, block_max, largest)
    return function


def values_function(frame: ForwardFrame, vectors: int) -> Value:
    """O = rescale * O + P V for one block of keys and `vectors` vectors of queries.

    Rows of P and O have `width` bytes, which may be those of more vectors.
    """
    e = frame.e
    arguments = [*[POINTER] * 4, *[INT64] * 4]
    with e.function(f"values_{vectors}", arguments) as (function, args):
        value, weights, rescale, out, value_row, v_head_dim, count, width = args
        factors = vectors_at(e, rescale, vectors)

        def add_columns(d: Value, sums: list[Value]) -> None:
            first = e.at(out, e.mul(d, width))
            for i in range(len(sums) // vectors):
                own = sums[i * vectors : (i + 1) * vectors]
                _rescale_and_add(e, e.at(first, e.mul(width, i)), factors, own)

        combine_rows(
            e, value, value_row, count, weights, vectors, v_head_dim,
            frame.shape.keys_of(vectors), add_columns, width,
        )  # fmt: skip
    return function


def _rescale_and_add(e: Emitter, place: Value, factors: list[Value], totals: list[Value]) -> None:
    for n, (factor, total) in enumerate(zip(factors, totals, strict=True)):
        at = e.at(place, n * e.vector_bytes)
        e.store_vector(e.fma(e.load_vector(at), factor, total), at)


def selected_values_function(frame: ForwardFrame, vectors: int) -> Value:
    """`values_function` for values that are not all finite.

    A forbidden pair leaves O alone: 0 * inf would be NaN.
    """
    e = frame.e
    arguments = [*[POINTER] * 4, *[INT64] * 4]
    with e.function(f"selected_values_{vectors}", arguments) as (function, args):
        value, weights, rescale, out, value_row, v_head_dim, count, width = args
        b = e.builder
        factors = vectors_at(e, rescale, vectors)
        forbidden = forbidden_bits(e)

        def add_column(d: Value, _: list[Value]) -> None:
            start = e.at(value, e.mul(d, e.real_bytes))

            def add_key(k: Value, total: list[Value]) -> list[Value]:
                x = e.splat(e.load(e.at(start, e.mul(k, value_row)), e.real, e.real_bytes))
                following = []
                for p, old in zip(vectors_at(e, weights, vectors, k, width), total, strict=True):
                    allowed = is_allowed(e, p, forbidden)
                    following.append(b.select(allowed, e.fma(x, p, old), old))
                return following

            total = e.loop(0, count, 1, [e.const(0.0)] * vectors, add_key)
            _rescale_and_add(e, e.at(out, e.mul(d, width)), factors, total)

        e.loop(0, v_head_dim, 1, [], add_column)
    return function
