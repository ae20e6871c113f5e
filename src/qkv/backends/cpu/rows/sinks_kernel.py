"""The kernel that lets sinks take their share; `sinks` has the formula.

It computes in float64 and rounds once to the type of storage.
"""

from __future__ import annotations

import math

from llvmlite import ir

from qkv.backends.cpu.emit import storage, vector_math
from qkv.backends.cpu.emit.emitter import DOUBLE, FLOAT, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.rows.head_job import emit_head_job
from qkv.backends.cpu.rows.layout import SINKS_FIELDS, SinksKey


def emit_sinks(key: SinksKey) -> str:
    """The module of one kernel; `job(arguments, worker)` takes the rows of a head for each task."""
    e = Emitter("sinks", key.lanes, DOUBLE, halves=key.halves, fused=key.fused)
    item, out_item = storage.ITEM_BYTES[key.dtype], storage.ITEM_BYTES[key.out_dtype]
    scale = _scale_function(e, key)
    several, single = (_rows_function(e, key, scale, count) for count in (key.lanes, 1))

    def share_head(number: Value, fields: dict[str, Value]) -> None:
        b = e.builder
        which = b.srem(number, fields["heads"])
        sink = e.load(e.at(e.pointer(fields["sinks"]), e.mul(which, 8)), DOUBLE, 8)
        first = e.mul(number, fields["length"])
        has_rest = b.icmp_signed("!=", fields["rest"], e.index(0))

        def share_rows(function: Value, r: Value) -> None:
            place = e.add(first, r)
            entries = e.mul(place, fields["dim"])
            b.call(
                function,
                [
                    e.at(e.pointer(fields["keys_out"]), e.mul(entries, item)),
                    e.at(e.pointer(fields["keys_lse"]), e.mul(place, item)),
                    e.at(e.pointer(fields["rest"]), e.mul(place, item)),
                    e.at(e.pointer(fields["out"]), e.mul(entries, out_item)),
                    e.at(e.pointer(fields["lse"]), e.mul(place, item)),
                    sink,
                    has_rest,
                    fields["dim"],
                ],
            )

        whole = e.round_down(fields["length"], e.lanes)
        e.loop(0, whole, e.lanes, [], lambda r, _: share_rows(several, r))
        e.loop(whole, fields["length"], 1, [], lambda r, _: share_rows(single, r))

    emit_head_job(e, SINKS_FIELDS, share_head)
    return str(e.module)


def _rows_function(e: Emitter, key: SinksKey, scale: Value, count: int) -> Value:
    """A function that lets a sink take its share of `count` rows, one or as many as lanes.

    Its arguments are `(keys_out, keys_lse, rest, out, lse, sink, has_rest, dim)`.
    """
    item, out_item = storage.ITEM_BYTES[key.dtype], storage.ITEM_BYTES[key.out_dtype]
    arguments = [*[POINTER] * 5, DOUBLE, ir.IntType(1), INT64]
    lanes = count if count > 1 else 0
    with e.function(f"rows_{count}", arguments, in_place=True) as (function, args):
        keys_out, keys_lse, rest, out, lse, sink, has_rest, dim = args
        b = e.builder

        def load(pointer: Value) -> Value:
            # One row is computed as a vector too, since the elementary functions take vectors.
            value = storage.load(e, pointer, key.dtype, lanes)
            return value if lanes else e.splat(value)

        def store(vector: Value, pointer: Value) -> None:
            value = vector if lanes else e.extract(vector, 0)
            if key.dtype != "float64":
                value = b.fptrunc(value, ir.VectorType(FLOAT, lanes) if lanes else FLOAT)
            e.store(value, pointer, item)

        place = e.stack_words(e.lanes)
        e.store(ir.Constant(e.vector, None), place, 8)
        with b.if_then(has_rest):
            e.store(load(rest), place, 8)
        of_keys = b.fadd(load(keys_lse), e.load(place, e.vector, 8))
        sinks, one, zero = e.splat(sink), e.const(1.0), e.const(0.0)
        lowest = e.const(-math.inf)
        away = b.fsub(sinks, of_keys)
        # The difference of lse and the new lse would be inaccurate where both are large.
        no_keys = b.fcmp_ordered("==", of_keys, lowest)
        share = b.select(no_keys, zero, b.fdiv(one, b.fadd(one, vector_math.exp(e, away))))
        peak = b.select(b.fcmp_unordered("ugt", of_keys, sinks), of_keys, sinks)
        nearer = e.intrinsic("fabs", away)
        small = vector_math.exp(e, b.fneg(nearer))
        more = b.select(b.fcmp_ordered("==", peak, lowest), zero, _log1p(e, small))
        total = b.fadd(peak, more)
        stored = _rounded(e, total, key.dtype)
        store(stored, lse)
        with b.if_then(has_rest):
            lost = b.fadd(b.fsub(peak, stored), more)
            is_infinite = b.fcmp_ordered("==", e.intrinsic("fabs", stored), e.const(math.inf))
            store(b.select(is_infinite, zero, lost), rest)
        factors = _rounded(e, share, key.dtype)
        for n in range(count):
            entries = e.mul(dim, n)
            b.call(
                scale,
                [
                    e.at(keys_out, e.mul(entries, item)),
                    e.at(out, e.mul(entries, out_item)),
                    e.extract(factors, n),
                    dim,
                ],
            )
    return function


def _scale_function(e: Emitter, key: SinksKey) -> Value:
    """A function that multiplies one row: `(keys_out, out, factor, dim)`."""
    item, out_item = storage.ITEM_BYTES[key.dtype], storage.ITEM_BYTES[key.out_dtype]
    with e.function("scale", [POINTER, POINTER, DOUBLE, INT64], in_place=True) as (function, args):
        keys_out, out, factor, dim = args
        b, factors = e.builder, e.splat(factor)

        def multiply(d: Value, by: Value, lanes: int) -> None:
            place = e.at(keys_out, e.mul(d, item))
            product = b.fmul(storage.load(e, place, key.dtype, lanes), by)
            if key.dtype != "float64":
                real = b.fptrunc(product, ir.VectorType(FLOAT, lanes) if lanes else FLOAT)
                if key.keeps:
                    e.store(real, place, item)
                product = _stored(e, real, key.out_dtype)
            e.store(product, e.at(out, e.mul(d, out_item)), out_item)

        def scale_vector(d: Value, _: list[Value]) -> None:
            multiply(d, factors, e.lanes)

        def scale_entry(d: Value, _: list[Value]) -> None:
            multiply(d, factor, 0)

        # Vectors may not overlap: where `out` is `keys_out`, an entry would be scaled twice.
        stop = e.round_down(dim, e.lanes)
        e.loop(0, stop, e.lanes, [], scale_vector)
        e.loop(stop, dim, 1, [], scale_entry)
    return function


def _log1p(e: Emitter, x: Value) -> Value:
    """log(1 + x) for 0 <= x <= 1, also where 1 + x rounds x away."""
    b = e.builder
    one = e.const(1.0)
    total = b.fadd(one, x)
    lost = b.fsub(x, b.fsub(total, one))
    return b.fadd(vector_math.log(e, total), b.fdiv(lost, total))


def _rounded(e: Emitter, vector: Value, dtype: str) -> Value:
    """float64 numbers that the type can hold."""
    if dtype == "float64":
        return vector
    b = e.builder
    return b.fpext(b.fptrunc(vector, ir.VectorType(FLOAT, e.lanes)), e.vector)


def _stored(e: Emitter, real: Value, dtype: str) -> Value:
    """float32 as the output holds it."""
    return real if dtype == "float32" else storage.narrow_float32(e, real, dtype)
