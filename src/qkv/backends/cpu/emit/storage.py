"""Numbers as they are stored: widened to the type of computation, and rounded to the stored type.

All functions take scalars and vectors alike. float16 is converted by the machine where it can, and
by integer arithmetic elsewhere; bfloat16 is the upper half of a float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import (
    BYTE,
    DOUBLE,
    FLOAT,
    HALF,
    INT16,
    INT32,
    Emitter,
    Value,
    is_vector,
)

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1,
}  # fmt: skip
_RAW_TYPES = {
    "float64": DOUBLE,
    "float32": FLOAT,
    "float16": INT16,
    "bfloat16": INT16,
    "int8": BYTE,
}


def load(
    e: Emitter, pointer: Value, dtype: str, lanes: int = 0, live: Value | None = None
) -> Value:
    """One element, or `lanes` adjacent ones, as `e.real`; lanes that are not `live` are 0."""
    raw: Any = _RAW_TYPES[dtype]
    if lanes:
        raw = ir.VectorType(raw, lanes)
    if live is not None:
        return widen(e, e.load_where(live, pointer, raw, ITEM_BYTES[dtype]), dtype)
    return widen(e, e.load(pointer, raw, ITEM_BYTES[dtype]), dtype)


def store(e: Emitter, value: Value, pointer: Value, dtype: str) -> None:
    """Round to nearest, ties to even, and store."""
    e.store(narrow(e, value, dtype), pointer, ITEM_BYTES[dtype])


def real_dtype(e: Emitter) -> str:
    return "float32" if e.real == FLOAT else "float64"


def widen(e: Emitter, raw: Value, dtype: str) -> Value:
    """A stored element as `e.real`."""
    b = e.builder
    if dtype == real_dtype(e):
        return raw
    match dtype:
        case "float32":
            return b.fpext(raw, _type_like(raw, DOUBLE))
        case "int8":
            return b.sitofp(raw, _type_like(raw, e.real))
        case "bfloat16":
            wide = b.zext(raw, _type_like(raw, INT32))
            value = b.bitcast(b.shl(wide, _constant_like(wide, 16)), _type_like(raw, FLOAT))
        case "float16" if e.halves:
            value = b.fpext(b.bitcast(raw, _type_like(raw, HALF)), _type_like(raw, FLOAT))
        case _:
            value = _half_to_float(e, b.zext(raw, _type_like(raw, INT32)))
    return value if e.real == FLOAT else b.fpext(value, _type_like(raw, DOUBLE))


def narrow(e: Emitter, value: Value, dtype: str) -> Value:
    """A number of type `e.real` as it is stored; for 16-bit types, `e.real` is float32."""
    if dtype == real_dtype(e):
        return value
    return narrow_float32(e, value, dtype)


def narrow_float32(e: Emitter, value: Value, dtype: str) -> Value:
    """float32 rounded to a 16-bit type, as the integer of its bits."""
    b = e.builder
    bits = b.bitcast(value, _type_like(value, INT32))
    match dtype:
        case "bfloat16":
            return _float_to_bfloat16(e, value, bits)
        case "float16" if e.halves:
            return b.bitcast(b.fptrunc(value, _type_like(value, HALF)), _type_like(value, INT16))
    return _float_to_half(e, bits)


def _type_like(value: Value, element: Any) -> Any:
    return ir.VectorType(element, value.type.count) if is_vector(value) else element


def _constant_like(value: Value, number: float) -> Value:
    same = [number] * value.type.count if is_vector(value) else number
    return ir.Constant(value.type, same)


def _float_to_bfloat16(e: Emitter, value: Value, bits: Value) -> Value:
    b = e.builder
    odd = b.and_(b.lshr(bits, _constant_like(bits, 16)), _constant_like(bits, 1))
    rounded = b.add(bits, b.add(odd, _constant_like(bits, 0x7FFF)))
    quiet = b.or_(bits, _constant_like(bits, 0x400000))
    result = b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)
    return b.trunc(b.lshr(result, _constant_like(bits, 16)), _type_like(value, INT16))


def _half_to_float(e: Emitter, halves: Value) -> Value:
    b = e.builder

    def const(number: int) -> Value:
        return _constant_like(halves, number)

    sign = b.shl(b.and_(halves, const(0x8000)), const(16))
    magnitude = b.shl(b.and_(halves, const(0x7FFF)), const(13))
    floats = b.bitcast(magnitude, _type_like(halves, FLOAT))
    scaled = b.bitcast(b.fmul(floats, _constant_like(floats, 2.0**112)), halves.type)
    is_not_finite = b.icmp_unsigned(">=", magnitude, const(0x7C00 << 13))
    not_finite = b.or_(magnitude, const(0x7F800000))
    return b.bitcast(b.or_(b.select(is_not_finite, not_finite, scaled), sign), floats.type)


def _float_to_half(e: Emitter, bits: Value) -> Value:
    """Round to nearest in integer arithmetic."""
    b = e.builder

    def const(number: int) -> Value:
        return _constant_like(bits, number)

    real = _type_like(bits, FLOAT)
    magnitude = b.and_(bits, const(0x7FFFFFFF))
    sign = b.lshr(b.and_(bits, const(-(2**31))), const(16))
    # The fraction of a normal result loses 13 bits, rounded to nearest, ties to even.
    odd = b.and_(b.lshr(magnitude, const(13)), const(1))
    normal = b.add(magnitude, b.add(odd, const(0xFFF - ((127 - 15) << 23))))
    normal = b.lshr(normal, const(13))
    # Subnormal results are multiples of 2^-24, the spacing of float32 at 1/2: adding 1/2 rounds.
    half = _constant_like(b.bitcast(magnitude, real), 0.5)
    shifted = b.fadd(b.bitcast(magnitude, real), half)
    subnormal = b.sub(b.bitcast(shifted, bits.type), const(126 << 23))
    result = b.select(b.icmp_signed("<", magnitude, const(113 << 23)), subnormal, normal)
    overflow = b.icmp_signed(">=", magnitude, const(0x477FF000))
    result = b.select(overflow, const(0x7C00), result)
    nan = b.icmp_signed(">", magnitude, const(0x7F800000))
    result = b.select(nan, const(0x7E00), result)
    return b.trunc(b.or_(result, sign), _type_like(bits, INT16))
