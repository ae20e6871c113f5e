"""Rows of a block of queries: packed for the backward pass, in pairs, and written back."""

from __future__ import annotations

from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Value
from qkv.backends.cpu.emit.packing import pack_rows, unpack_rows
from qkv.backends.cpu.emit.storage import real_dtype
from qkv.backends.cpu.products.bfloat16 import emit_round_to_chunks, join_pairs, round_to_bfloat16
from qkv.backends.cpu.products.layout import CHUNK
from qkv.backends.cpu.products.query_lanes import half_ranges


def pack_function(frame: BackwardFrame, dtype: str) -> Value:
    """Packs one vector of rows, transposed; lanes beyond the last row repeat it."""
    e = frame.e
    arguments = [POINTER, *[INT64] * 5, POINTER, INT64]
    with e.function(f"pack_{dtype}", arguments) as (function, args):
        pointer, row, element, first, last, dim, packed, width = args
        rows = [e.at(pointer, e.mul(e.least(e.add(first, i), last), row)) for i in range(e.lanes)]
        pack_rows(
            e, rows, element, dim, dtype,
            lambda d, vector: e.store_vector(vector, e.at(packed, e.mul(d, width))),
        )  # fmt: skip
    return function


def delta_function(frame: BackwardFrame) -> Value:
    """One vector of queries: delta = rowsum(dO * O) - d lse; `delta` holds d lse before.

    In two parts, added up in the order of dP = dO . V, so that delta and dP are equal where one key
    has all the weight.
    """
    e = frame.e
    with e.function("delta", [*[POINTER] * 3, INT64, INT64]) as (function, args):
        grad_out, out, delta, dim, width = args

        number, size = frame.number_of_terms(dim), frame.elements_of_term

        def add_element(d: Value, total: list[Value]) -> list[Value]:
            a, b = (e.load_vector(e.at(rows, e.mul(d, width))) for rows in (grad_out, out))
            return [e.fma(a, b, total[0])]

        parts = [(e.mul(a, size), e.least(e.mul(b, size), dim)) for a, b in half_ranges(e, number)]
        first, second = (e.loop(*part, 1, [e.const(0.0)], add_element)[0] for part in parts)
        second = e.builder.fsub(second, e.load_vector(delta))
        e.store_vector(first, delta)
        e.store_vector(second, e.at(delta, width))
    return function


def pair_rows_function(frame: BackwardFrame, *, finite: bool = False) -> Value:
    """Packs rows of bfloat16 in pairs: each lane then holds the elements of two neighbouring rows.

    The last term is filled up with zeros, which follow the rows. If `finite`, elements that are not
    become 0.
    """
    e, factor = frame.e, frame.packed_pairs()
    with e.function("pair_finite" if finite else "pair", [POINTER, INT64, INT64, POINTER]) as (
        function,
        args,
    ):
        packed, dim, width, pairs = args
        size = factor.elements // 2

        def pair_rows(p: Value, _: list[Value]) -> None:
            first, to = (e.at(area, e.mul(p, n, width)) for area, n in ((packed, 2), (pairs, 1)))

            def pair_vectors(offset: Value, _: list[Value]) -> None:
                rows = [
                    e.load_vector(e.at(first, e.mul(width, n), offset)) for n in range(2 * size)
                ]
                if finite:
                    rows = [frame.finite_part(row) for row in rows]
                joined = [join_pairs(e, *rows[n : n + 2]) for n in range(0, 2 * size, 2)]
                for n, row in enumerate(factor.packed_rows(joined)):
                    e.store_vector(row, e.at(to, e.mul(width, n), offset))

            e.loop(0, width, e.vector_bytes, [], pair_vectors)

        number = e.mul(frame.number_of_terms(dim), size)
        e.loop(0, number, size, [], pair_rows)
    return function


def narrow_function(frame: BackwardFrame, *, finite: bool = False) -> Value:
    """Makes bfloat16 of rows that were widened, in whole chunks; 0 behind the last element.

    If `finite`, elements that are not become 0.
    """
    e = frame.e
    with e.function(
        "narrow_finite" if finite else "narrow", [POINTER, INT64, INT64, INT64, POINTER]
    ) as (function, args):
        source, row, dim, count, target = args
        b, size = e.builder, e.mul(2, emit_round_to_chunks(e, dim))

        def narrow_row(k: Value, _: list[Value]) -> None:
            start, to = e.at(source, e.mul(k, row)), e.at(target, e.mul(k, size))

            def narrow_chunk(d: Value, _: list[Value]) -> None:
                halves = []
                for n in (0, e.lanes):
                    at = e.at(start, e.mul(e.add(d, n), e.real_bytes))
                    there = e.first_lanes(e.sub(dim, e.add(d, n)))
                    x = e.load_vector(at, aligned=False)
                    x = frame.finite_part(x) if finite else x
                    halves.append(b.select(there, x, e.const(0.0)))
                e.store_vector(
                    b.bitcast(round_to_bfloat16(e, *map(e.as_bits, halves)), e.vector),
                    e.at(to, e.mul(d, 2)),
                )

            e.loop(0, dim, CHUNK, [], narrow_chunk)

        e.loop(0, count, 1, [], narrow_row)
    return function


def unpack_function(frame: BackwardFrame) -> Value:
    """Writes rows of a part of dQ for one vector; lanes beyond the last row write it again."""
    e = frame.e
    arguments = [POINTER, INT64, POINTER, INT64, INT64, INT64]
    with e.function("unpack", arguments) as (function, args):
        sums, width, out, first, last, dim = args
        row = e.mul(dim, e.real_bytes)
        rows = [e.at(out, e.mul(e.least(e.add(first, i), last), row)) for i in range(e.lanes)]
        unpack_rows(
            e, rows, dim, real_dtype(e), lambda d: e.load_vector(e.at(sums, e.mul(d, width)))
        )
    return function
