"""Pairs of bfloat16 numbers in the lanes of a vector, and rows of pairs in whole chunks.

Where `Emitter.emulated`, the instructions for bfloat16 (AVX512-BF16) are written out as the manual
defines them: they take subnormal numbers for zeros, and give zeros instead of them.
"""

from __future__ import annotations

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import INT16, Emitter, Value

CHUNK = 32
"""Number of bfloat16 elements in one vector, which is one row of a tile. Copied rows are padded to
whole chunks."""


def round_to_chunks(dim: int) -> int:
    """`dim` rounded up to whole chunks."""
    return -(-dim // CHUNK) * CHUNK


def emit_round_to_chunks(e: Emitter, dim: Value) -> Value:
    """`round_to_chunks` of a value at run time."""
    return e.round_down(e.add(dim, CHUNK - 1), CHUNK)


def multiply_add_pairs(e: Emitter, x: Value, y: Value, total: Value) -> Value:
    """total + x . y, for a pair of bfloat16 in each lane.

    The product of the second elements is added first, each by a multiply-add that rounds once
    (Intel, "Architectures Software Developer's Manual", volume 2, VDPBF16PS, 2024).
    """
    if e.emulated:
        return e.builder.call(_emulated_multiply_add_pairs(e), [x, y, total])
    pairs = (e.as_bits(x), e.as_bits(y))
    return e.machine_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", e.vector, total, *pairs)


def join_pairs(e: Emitter, first: Value, second: Value) -> Value:
    """Two vectors of float32 as pairs, rounded to nearest; NaN and the sign of zeros stay."""
    b, both = e.builder, round_to_bfloat16(e, e.as_bits(first), e.as_bits(second))
    order = [half * e.lanes + lane for lane in range(e.lanes) for half in range(2)]
    return b.bitcast(b.shuffle_vector(both, both, e.shuffle_mask(order)), e.vector)


def round_to_bfloat16(e: Emitter, first: Value, second: Value) -> Value:
    """Two vectors of float32 as one of bfloat16, rounded to nearest, the first one in front."""
    if e.emulated:
        return e.builder.call(_emulated_round_to_bfloat16(e), [first, second])
    halves = ir.VectorType(INT16, CHUNK)
    floats = e.as_floats(second), e.as_floats(first)
    return e.machine_intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", halves, *floats)


def split_pairs(e: Emitter, pairs: Value) -> tuple[Value, Value]:
    """The first and the second element of every pair, as float32."""
    b, bits = e.builder, e.as_bits(pairs)
    first, second = b.shl(bits, e.const_bits(16)), b.and_(bits, e.const_bits(-(2**16)))
    return e.as_floats(first), e.as_floats(second)


# The instructions written out. They are functions, as copies of them would take long to compile.


def _emulated_multiply_add_pairs(e: Emitter) -> Value:
    name = "multiply_add_pairs"
    known = e.module.globals.get(name)
    if known is not None:
        return known
    with e.function(name, [e.vector] * 3, e.vector) as (function, (x, y, total)):
        total = flushed(e, total)
        for first, second in reversed(list(zip(split_pairs(e, x), split_pairs(e, y), strict=True))):
            total = multiply_add(e, flushed(e, first), flushed(e, second), total)
        e.builder.ret(total)
    return function


def _emulated_round_to_bfloat16(e: Emitter) -> Value:
    name, halves = "round_to_bfloat16", ir.VectorType(INT16, CHUNK)
    known = e.module.globals.get(name)
    if known is not None:
        return known
    with e.function(name, [e.bits] * 2, halves) as (function, parts):
        rounded = [storage.narrow(e, flushed(e, e.as_floats(x)), "bfloat16") for x in parts]
        e.builder.ret(e.builder.shuffle_vector(*rounded, e.shuffle_mask(range(CHUNK))))
    return function


def multiply_add(e: Emitter, x: Value, y: Value, total: Value) -> Value:
    """total + x * y of float32 in each lane, rounded once; a subnormal result becomes 0."""
    return flushed(e, e.intrinsic("fma", x, y, total))


def flushed(e: Emitter, x: Value) -> Value:
    """float32 with subnormal numbers replaced by zeros of their sign."""
    b, bits = e.builder, e.as_bits(x)
    exponent = b.and_(bits, e.const_bits(0x7F800000))
    is_small = b.icmp_signed("==", exponent, e.const_bits(0))
    return e.as_floats(b.select(is_small, b.and_(bits, e.const_bits(-(2**31))), bits))
