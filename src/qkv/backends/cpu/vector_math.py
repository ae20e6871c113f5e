"""Elementary functions of float32 vectors, to a few units in the last place.

They are correct for infinities, NaN, zeros and arguments of any size. Polynomials: minimax of
degree 6 for exp (relative error 8e-8); log and tanh after Moshier, "Cephes" (1992).
"""

from __future__ import annotations

import math

from qkv.backends.cpu.ir import Emitter, Value

_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693145751953125
_LN2_LOW = 1.42860677e-6
_ROUND = 12582912.0
"""Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits."""
_ROUND_BITS = 0x4B400000

_EXP2 = (
    1.0, 0.693147182, 0.240226462, 0.0555032864, 0.00961848907, 0.00133999309, 0.000153458124,
)  # fmt: skip
_EXP = tuple(c / math.log(2) ** i for i, c in enumerate(_EXP2))
_LOG = (
    3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1,
    -1.2420140846e-1, 1.1676998740e-1, -1.1514610310e-1, 7.0376836292e-2,
)  # fmt: skip
_TANH = (
    -3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2, 2.06390887954e-2, -5.70498872745e-3,
)  # fmt: skip

SMALLEST_EXPONENT = -87.3
"""Below this, exp leaves the normal numbers."""


def polynomial(e: Emitter, coefficients: tuple[float, ...], x: Value) -> Value:
    """Horner's rule; the constant term comes first."""
    total = e.const(coefficients[-1])
    for c in coefficients[-2::-1]:
        total = e.fma(total, x, e.const(c))
    return total


def _split(e: Emitter, x: Value) -> tuple[Value, Value]:
    """x = n * ln 2 + f with |f| <= ln(2) / 2: exp(f), and n + 127 in the low bits of an integer."""
    b = e.builder
    magic = e.const(_ROUND + 127)
    shifted = e.fma(x, e.const(_LOG2_E), magic)
    n = b.fsub(shifted, magic)
    f = e.fma(n, e.const(-_LN2_HIGH), x)
    f = e.fma(n, e.const(-_LN2_LOW), f)
    return polynomial(e, _EXP, f), e.as_bits(shifted)


def exp_flushed(e: Emitter, x: Value) -> Value:
    """exp(x) for x <= 0: exactly 0 once it leaves the normal numbers, NaN for NaN."""
    b = e.builder
    fraction, exponent = _split(e, x)
    power = e.as_floats(b.shl(exponent, e.const_bits(23)))
    normal = b.fcmp_unordered(">=", x, e.const(SMALLEST_EXPONENT))
    return b.select(normal, b.fmul(fraction, power), e.const(0.0))


def exp(e: Emitter, x: Value) -> Value:
    """exp(x) everywhere, subnormal results included."""
    b = e.builder
    # Beyond these bounds the result is 0 or infinity; NaN passes both selections.
    x = b.select(b.fcmp_ordered("<", x, e.const(-104.0)), e.const(-104.0), x)
    x = b.select(b.fcmp_ordered(">", x, e.const(89.0)), e.const(89.0), x)
    fraction, exponent = _split(e, x)
    # 2^n may lie outside the floats where the result does not: multiply in two halves.
    n = b.sub(exponent, e.const_bits(_ROUND_BITS + 127))
    half = b.ashr(n, e.const_bits(1))
    for part in (half, b.sub(n, half)):
        power = e.as_floats(b.shl(b.add(part, e.const_bits(127)), e.const_bits(23)))
        fraction = b.fmul(fraction, power)
    return fraction


def log(e: Emitter, x: Value) -> Value:
    """Natural logarithm; log(0) = -inf, log of a negative number is NaN."""
    b = e.builder
    subnormal = b.fcmp_ordered("<", x, e.const(2.0**-126))
    scaled = b.select(subnormal, b.fmul(x, e.const(2.0**25)), x)
    # x = m * 2^n with m in [sqrt(1/2), sqrt(2)).
    offset = e.const_bits(0x3F3504F3)
    bits = b.sub(e.as_bits(scaled), offset)
    n = b.ashr(bits, e.const_bits(23))
    m = b.add(b.and_(bits, e.const_bits(0x7FFFFF)), offset)
    exponent = b.fsub(b.sitofp(n, e.vector), b.select(subnormal, e.const(25.0), e.const(0.0)))
    f = b.fsub(e.as_floats(m), e.const(1.0))
    square = b.fmul(f, f)
    tail = b.fmul(b.fmul(f, square), polynomial(e, _LOG, f))
    tail = e.fma(exponent, e.const(-2.12194440e-4), tail)
    tail = e.fma(square, e.const(-0.5), tail)
    result = e.fma(exponent, e.const(0.693359375), b.fadd(f, tail))
    result = b.select(b.fcmp_ordered("==", x, e.const(0.0)), e.const(-math.inf), result)
    result = b.select(b.fcmp_ordered("==", x, e.const(math.inf)), x, result)
    negative = b.fcmp_unordered("<", x, e.const(0.0))
    return b.select(negative, e.const(math.nan), result)


def tanh(e: Emitter, x: Value) -> Value:
    """Odd polynomial near 0, 1 - 2 / (exp(2 |x|) + 1) elsewhere."""
    b = e.builder
    magnitude = e.intrinsic("fabs", x)
    square = b.fmul(x, x)
    near = e.fma(b.fmul(polynomial(e, _TANH, square), square), x, x)
    # 2 |x| is kept below the overflow of exp; NaN goes on.
    doubled = b.fadd(magnitude, magnitude)
    doubled = b.select(b.fcmp_ordered(">", doubled, e.const(40.0)), e.const(40.0), doubled)
    fraction, exponent = _split(e, doubled)
    power = e.as_floats(b.shl(exponent, e.const_bits(23)))
    quotient = b.fdiv(e.const(2.0), e.fma(fraction, power, e.const(1.0)))
    far = e.intrinsic("copysign", b.fsub(e.const(1.0), quotient), x)
    return b.select(b.fcmp_ordered("<", magnitude, e.const(0.625)), near, far)


def half_to_float(e: Emitter, halves: Value) -> Value:
    """float16 given as the low bits of integers, in integer arithmetic: every machine has it."""
    b = e.builder
    sign = b.shl(b.and_(halves, e.const_bits(0x8000)), e.const_bits(16))
    magnitude = b.shl(b.and_(halves, e.const_bits(0x7FFF)), e.const_bits(13))
    value = e.as_bits(b.fmul(e.as_floats(magnitude), e.const(2.0**112)))
    special = b.icmp_unsigned(">=", magnitude, e.const_bits(0x7C00 << 13))
    kept = b.or_(magnitude, e.const_bits(0x7F800000))
    return e.as_floats(b.or_(b.select(special, kept, value), sign))
