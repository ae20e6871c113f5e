"""Pairs of bfloat16 numbers in the lanes of a vector, and rows of pairs in whole chunks."""

from __future__ import annotations

from llvmlite import ir

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
    """total + x . y, for a pair of bfloat16 in each lane."""
    pairs = (e.as_bits(x), e.as_bits(y))
    return e.machine_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", e.vector, total, *pairs)


def join_pairs(e: Emitter, first: Value, second: Value) -> Value:
    """Two vectors of float32 as pairs, rounded to nearest; NaN and the sign of zeros stay."""
    b, both = e.builder, round_to_bfloat16(e, e.as_bits(first), e.as_bits(second))
    order = [half * e.lanes + lane for lane in range(e.lanes) for half in range(2)]
    return b.bitcast(b.shuffle_vector(both, both, e.shuffle_mask(order)), e.vector)


def round_to_bfloat16(e: Emitter, first: Value, second: Value) -> Value:
    """Two vectors of float32 as one of bfloat16, rounded to nearest, the first one in front."""
    halves = ir.VectorType(INT16, CHUNK)
    floats = e.as_floats(second), e.as_floats(first)
    return e.machine_intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", halves, *floats)


def split_pairs(e: Emitter, pairs: Value) -> tuple[Value, Value]:
    """The first and the second element of every pair, as float32."""
    b, bits = e.builder, e.as_bits(pairs)
    first, second = b.shl(bits, e.const_bits(16)), b.and_(bits, e.const_bits(-(2**16)))
    return e.as_floats(first), e.as_floats(second)
