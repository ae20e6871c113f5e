"""Philox4x32-10 on vectors of 64-bit lanes; the same words as `qkv.problem.philox`."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import INT64, Emitter, Value
from qkv.problem.philox import MULTIPLIERS, WEYL

_LOW = 0xFFFFFFFF


def random_word(e: Emitter, counter: Sequence[Value], seed: Value) -> Value:
    """The first word of the output, for four counter words in 64-bit lanes and a uniform seed."""
    b = e.builder
    wide = ir.VectorType(INT64, e.lanes)

    def const(number: int) -> Value:
        return ir.Constant(wide, [number] * e.lanes)

    x0, x1, x2, x3 = counter
    low = ir.Constant(INT64, _LOW)
    k0, k1 = b.and_(seed, low), b.lshr(seed, ir.Constant(INT64, 32))
    for _ in range(10):
        p0, p2 = b.mul(x0, const(MULTIPLIERS[0])), b.mul(x2, const(MULTIPLIERS[1]))
        high0, high2 = b.lshr(p0, const(32)), b.lshr(p2, const(32))
        x0 = b.xor(b.xor(high2, x1), e.splat(k0))
        x2 = b.xor(b.xor(high0, x3), e.splat(k1))
        x1, x3 = b.and_(p2, const(_LOW)), b.and_(p0, const(_LOW))
        k0 = b.and_(b.add(k0, ir.Constant(INT64, WEYL[0])), low)
        k1 = b.and_(b.add(k1, ir.Constant(INT64, WEYL[1])), low)
    return x0
