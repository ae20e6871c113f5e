"""The functions of tangent kernels that do not depend on masks and score mods."""

from __future__ import annotations

from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.backward.gradient_sums import (
    key_sums_function,
    query_sums_function,
    selected_key_sums_function,
    selected_query_sums_function,
    transpose_function,
)
from qkv.backends.cpu.backward.layout import BackwardKey
from qkv.backends.cpu.backward.query_rows import pack_function, unpack_function
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.emit.packing import all_finite_function
from qkv.backends.cpu.emit.storage import real_dtype
from qkv.backends.cpu.emit.structured_code import Maker, written
from qkv.backends.cpu.products.query_lanes import dot_rows, store_vectors, vectors_at


def emit_products(key: BackwardKey) -> str:
    """The module of the products of rows of keys with packed queries."""
    frame = BackwardFrame(key)
    return frame.e.sharing(list(_products(frame, written).values()))


def declare_shared(frame: BackwardFrame) -> dict[str, Value]:
    """The functions of all modules; those for some vectors of queries have a number."""
    declare = frame.e.declared
    functions = {
        "unpack": declare(unpack_function, frame),
        "transpose": declare(transpose_function, frame),
        "key_sums": declare(key_sums_function, frame),
        "all_finite": declare(all_finite_function, frame.e),
        "selected_key_sums": declare(selected_key_sums_function, frame),
        "pack": declare(pack_function, frame, real_dtype(frame.e)),
    }
    for vectors in frame.shape.block_sizes:
        functions[f"query_sums {vectors}"] = declare(query_sums_function, frame, vectors)
        write = selected_query_sums_function
        functions[f"selected_query_sums {vectors}"] = declare(write, frame, vectors)
    return functions | _products(frame, declare)


def _products(frame: BackwardFrame, make: Maker) -> dict[str, Value]:
    sizes = frame.shape.block_sizes
    return {f"multiply {size}": make(multiply_function, frame, size) for size in sizes}


def multiply_function(frame: BackwardFrame, vectors: int) -> Value:
    """out[k, :] = scale * rows[k, :] . packed, to which what lay there before is added on request.

    A function `(rows, packed, out, row, dim, count, scale, adds)`.
    """
    e = frame.e
    arguments = [*[POINTER] * 3, *[INT64] * 3, e.real, BIT]
    with e.function(f"multiply_{vectors}", arguments) as (function, args):
        rows, packed, out, row, dim, count, scale, adds = args
        b = e.builder
        factor, zero = e.splat(scale), e.const(0.0)

        def store_keys(k: Value, products: list[Value], _: list[Value]) -> list[Value]:
            place = e.at(out, e.mul(k, vectors * e.vector_bytes))
            before = vectors_at(e, place, len(products))
            kept = [b.select(adds, old, zero) for old in before]
            store_vectors(
                e, place, [e.fma(x, factor, y) for x, y in zip(products, kept, strict=True)]
            )
            return []

        keys = frame.shape.keys_of(vectors)
        dot_rows(e, rows, row, count, packed, vectors, dim, keys, [], store_keys)
    return function
