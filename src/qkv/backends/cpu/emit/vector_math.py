"""Elementary functions of vectors of float32 or float64, to a few units in the last place.

They are correct for infinities, NaN, zeros and arguments of any size. Polynomials: minimax for
2^x on [-1/2, 1/2] (relative error 1.9e-9 and 3e-18 before rounding); log after "Cephes" (Moshier
1992) in float32 and "fdlibm" (Sun 1993) in float64; tanh after Cephes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import FLOAT, Emitter, Value

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@dataclass(frozen=True, slots=True)
class _Format:
    """A floating type: bits of the fraction, bias of the exponent, polynomials."""

    fraction: int
    bias: int
    exp2: tuple[float, ...]
    ln2: tuple[float, float]
    """ln 2 as a high and a low part. Products of the high part with exponents are exact."""
    smallest: float
    """The number below which exp is 0."""
    largest: float
    """The number above which exp is infinite."""

    @property
    def round(self) -> float:
        """Adding this rounds to an integer and leaves it in the low bits."""
        return 1.5 * 2.0**self.fraction

    @property
    def round_bits(self) -> int:
        return (self.bias + self.fraction << self.fraction) + (1 << self.fraction - 1)


_FLOAT32 = _Format(
    23, 127,
    (1.0, 0.693147205737195751, 0.240226468906455207, 0.055503287771053248,
     0.00961848895633118162, 0.0013399931177239738, 0.000153458121613116298),
    (0.693145751953125, 1.42860677e-6), -104.0, 89.0,
)  # fmt: skip
_FLOAT64 = _Format(
    52, 1023,
    (1.0, 0.69314718055994533, 0.240226506959101562, 0.0555041086648199216,
     0.00961812910758833524, 0.00133335581467899217, 0.000154035304625144321,
     0.0000152527334899885256, 1.32154330896763992e-6, 1.01781980216719308e-7,
     7.0741056135081428e-9, 4.43528270695727715e-10),
    (0.693145751953125, 1.42860682030941723212e-6), -746.0, 710.0,
)  # fmt: skip

_LOG32 = (
    3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1,
    -1.2420140846e-1, 1.1676998740e-1, -1.1514610310e-1, 7.0376836292e-2,
)  # fmt: skip
_LOG64 = (
    6.666666666666735130e-1, 3.999999999940941908e-1, 2.857142874366239149e-1,
    2.222219843214978396e-1, 1.818357216161805012e-1, 1.531383769920937332e-1,
    1.479819860511658591e-1,
)  # fmt: skip
_TANH32 = (
    -3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2, 2.06390887954e-2, -5.70498872745e-3,
)  # fmt: skip
_EXP2_FLOORED = (
    1.0, 0.6931513118094645, 0.2401644500956895, 0.0557999133207169, 0.00901703001873218,
    0.0018671302133449897,
)  # fmt: skip
"""2^x on [0, 1], minimax of those that are 1 at 0 (relative error 8.2e-8)."""
_EXP2_FLOORED_PRECISE = (
    1.0, 0.6931470444435961, 0.24022930554747482, 0.05548528064475267, 0.009675451505918739,
    0.0012467847081048722, 0.000216129125317883,
)  # fmt: skip
"""The same with one term more (relative error 2e-9 before rounding)."""
_TANH64 = (
    (-1.61468768441708447952e3, -9.92877231001918586564e1, -9.64399179425052238628e-1),
    (4.84406305325125486048e3, 2.23548839060100448583e3, 1.12811678491632931402e2, 1.0),
)


def _format(e: Emitter) -> _Format:
    return _FLOAT32 if e.real == FLOAT else _FLOAT64


def polynomial(e: Emitter, coefficients: tuple[float, ...], x: Value) -> Value:
    """Horner's rule; the constant term comes first."""
    total = e.const(coefficients[-1])
    for c in coefficients[-2::-1]:
        total = e.fma(total, x, e.const(c))
    return total


def _split_exp(e: Emitter, x: Value) -> tuple[Value, Value]:
    """exp(f), and n + bias in the low bits, for x = n * ln 2 + f with |f| <= ln(2) / 2."""
    b, form = e.builder, _format(e)
    magic = e.const(form.round + form.bias)
    shifted = e.fma(x, e.const(LOG2_E), magic)
    n = b.fsub(shifted, magic)
    f = e.fma(n, e.const(-form.ln2[0]), x)
    f = e.fma(n, e.const(-form.ln2[1]), f)
    natural = tuple(c / math.log(2) ** i for i, c in enumerate(form.exp2))
    return polynomial(e, natural, f), e.as_bits(shifted)


def exp_flushed(e: Emitter, x: Value) -> Value:
    """exp(x) for x <= 0, NaN for NaN. Subnormal results are flushed to 0.

    `x log2(e)` is not rounded before its integer part is subtracted; where products are rounded,
    the integer part times ln 2 is subtracted from x instead.
    """
    b, form = e.builder, _format(e)
    if e.fused:
        magic, unit = e.const(form.round + form.bias), e.const(LOG2_E)
        shifted = e.fma(x, unit, magic)
        f = e.fma(x, unit, b.fsub(magic, shifted))
        power = e.as_floats(b.shl(e.as_bits(shifted), e.const_bits(form.fraction)))
        fraction = polynomial(e, form.exp2, f)
    else:
        fraction, exponent = _split_exp(e, x)
        power = e.as_floats(b.shl(exponent, e.const_bits(form.fraction)))
    return b.select(exp_is_nonzero(e, x), b.fmul(fraction, power), e.const(0.0))


def exp2_floored(e: Emitter, x: Value, *, precise: bool = False) -> Value:
    """2^x for any x, to 1.4e-7 of the result; exactly 1 for 0. Small results may be subnormal.

    If `precise`, to 6.5e-8.

    With two instructions of AVX-512: `vreduceps` subtracts the largest integer below x, `vscalefps`
    multiplies by two to its power. `Emitter.emulated` writes them out, to the same bits.
    """
    b, coefficients = e.builder, _EXP2_FLOORED_PRECISE if precise else _EXP2_FLOORED
    if not e.emulated:
        nothing, all_lanes = e.const(0.0), ir.Constant(ir.IntType(16), -1)
        mode = ir.Constant(ir.IntType(32), 9)  # No fraction bits, rounded down, silently.
        default = ir.Constant(ir.IntType(32), 4)  # The thread's rounding.
        fraction = e.machine_intrinsic(
            "llvm.x86.avx512.mask.reduce.ps.512", e.vector, x, mode, nothing, all_lanes, default
        )
        power = polynomial(e, coefficients, fraction)
        return e.machine_intrinsic(
            "llvm.x86.avx512.mask.scalef.ps.512", e.vector, power, x, nothing, all_lanes, default
        )
    floor = e.intrinsic("floor", x)
    rest = b.fsub(x, floor)
    # The instruction rounds down: of numbers between -1/2 and 0, the sum with 1 is not exact.
    is_above = b.fcmp_ordered(">", b.fadd(rest, floor), x)
    below = e.as_floats(b.sub(e.as_bits(rest), e.const_bits(1)))
    infinite = b.fcmp_ordered("==", e.intrinsic("fabs", x), e.const(math.inf))
    rest = b.select(infinite, e.const(0.0), b.select(is_above, below, rest))
    power = polynomial(e, coefficients, rest)
    # Two factors that are normal numbers: the first product is exact, unless it overflows.
    floor = b.select(b.fcmp_ordered(">", floor, e.const(-252.0)), floor, e.const(-252.0))
    floor = b.select(b.fcmp_ordered("<", floor, e.const(254.0)), floor, e.const(254.0))
    n = b.fptosi(floor, e.bits)
    half = b.ashr(n, e.const_bits(1))
    for part in (half, b.sub(n, half)):
        bits = b.shl(b.add(part, e.const_bits(127)), e.const_bits(23))
        power = b.fmul(power, e.as_floats(bits))
    return power


def exp_is_nonzero(e: Emitter, x: Value) -> Value:
    """Whether `exp_flushed(x)` is not 0: x is large enough, or NaN."""
    return e.builder.fcmp_unordered(">=", x, e.const((1 - _format(e).bias) * LN_2))


def exp(e: Emitter, x: Value) -> Value:
    """exp(x) everywhere, subnormal results included."""
    b, form = e.builder, _format(e)
    # Beyond these bounds the result is 0 or infinity; NaN passes both selections.
    x = b.select(b.fcmp_ordered("<", x, e.const(form.smallest)), e.const(form.smallest), x)
    x = b.select(b.fcmp_ordered(">", x, e.const(form.largest)), e.const(form.largest), x)
    fraction, exponent = _split_exp(e, x)
    # 2^n may overflow where the result does not, so it is applied as two factors.
    n = b.sub(exponent, e.const_bits(form.round_bits + form.bias))
    half = b.ashr(n, e.const_bits(1))
    for part in (half, b.sub(n, half)):
        power = b.shl(b.add(part, e.const_bits(form.bias)), e.const_bits(form.fraction))
        fraction = b.fmul(fraction, e.as_floats(power))
    return fraction


def log(e: Emitter, x: Value) -> Value:
    """Natural logarithm; log(0) = -inf, log of a negative number is NaN."""
    b = e.builder
    f, n = _split_log(e, x)
    high, tail = _log_terms(e, f, n)
    result = b.fadd(high, b.fadd(f, tail))
    result = b.select(b.fcmp_ordered("==", x, e.const(0.0)), e.const(-math.inf), result)
    result = b.select(b.fcmp_ordered("==", x, e.const(math.inf)), x, result)
    negative = b.fcmp_unordered("<", x, e.const(0.0))
    return b.select(negative, e.const(math.nan), result)


def add_log(e: Emitter, a: Value, x: Value, rest: Value) -> tuple[Value, Value]:
    """a + log(x + rest) for x >= 1 or NaN, and the rounding error of this sum.

    `rest` is the rounding error of x. Where a and log(x) cancel, this error and that of log(x)
    would be most of the error of the result.
    """
    b = e.builder
    f, n = _split_log(e, x)
    high, tail = _log_terms(e, f, n)
    first = b.fadd(a, high)
    second = b.fadd(first, f)
    lost = b.fadd(error_of_sum(e, a, high, first), error_of_sum(e, first, f, second))
    tail = b.fadd(b.fadd(tail, b.fdiv(rest, x)), lost)
    total = b.fadd(second, tail)
    finite = b.fcmp_ordered("<", x, e.const(math.inf))
    total = b.select(finite, total, b.fadd(a, x))
    return total, error_of_sum(e, second, tail, total)


def error_of_sum(e: Emitter, first: Value, second: Value, total: Value) -> Value:
    """The rounding error of first + second (Knuth's TwoSum)."""
    b = e.builder
    seen = b.fsub(total, first)
    lost = b.fsub(first, b.fsub(total, seen))
    return b.fadd(lost, b.fsub(second, seen))


def sum_of_lanes(e: Emitter, x: Value, rest: Value) -> tuple[Value, Value]:
    """The rounded sum of all lanes of x and of its `rest`, and the rounding error of this sum."""
    b, shift = e.builder, 1
    while shift < e.lanes:
        picks = e.shuffle_mask([i ^ shift for i in range(e.lanes)])
        other, its_rest = (b.shuffle_vector(vector, vector, picks) for vector in (x, rest))
        total = b.fadd(x, other)
        rest = b.fadd(b.fadd(rest, its_rest), error_of_sum(e, x, other, total))
        x, shift = total, 2 * shift
    total = b.fadd(x, rest)
    return total, error_of_sum(e, x, rest, total)


def _split_log(e: Emitter, x: Value) -> tuple[Value, Value]:
    """f and n of x = (1 + f) 2^n, with 1 + f in [sqrt(1/2), sqrt(2))."""
    b, form = e.builder, _format(e)
    lift = form.fraction + 2
    subnormal = b.fcmp_ordered("<", x, e.const(2.0 ** (1 - form.bias)))
    scaled = b.select(subnormal, b.fmul(x, e.const(2.0**lift)), x)
    offset = e.const_bits(0x3F3504F3 if e.real == FLOAT else 0x3FE6A09E667F3BCD)
    bits = b.sub(e.as_bits(scaled), offset)
    n = b.ashr(bits, e.const_bits(form.fraction))
    m = e.as_floats(b.add(b.and_(bits, e.const_bits((1 << form.fraction) - 1)), offset))
    lifted = b.select(subnormal, e.const(lift), e.const(0.0))
    n = b.fsub(b.sitofp(n, e.vector), lifted)
    return b.fsub(m, e.const(1.0)), n


def _log_terms(e: Emitter, f: Value, n: Value) -> tuple[Value, Value]:
    """`high`, which is exact, and `tail` of high + f + tail = n ln 2 + log(1 + f)."""
    return _log32_terms(e, f, n) if e.real == FLOAT else _log64_terms(e, f, n)


def _log32_terms(e: Emitter, f: Value, n: Value) -> tuple[Value, Value]:
    b = e.builder
    square = b.fmul(f, f)
    tail = b.fmul(b.fmul(f, square), polynomial(e, _LOG32, f))
    tail = e.fma(n, e.const(-2.12194440e-4), tail)
    tail = e.fma(square, e.const(-0.5), tail)
    return b.fmul(n, e.const(0.693359375)), tail


def _log64_terms(e: Emitter, f: Value, n: Value) -> tuple[Value, Value]:
    """The terms of `_log_terms` in float64, with log(1 + f) as 2 atanh(s), s = f / (2 + f)."""
    b = e.builder
    s = b.fdiv(f, b.fadd(f, e.const(2.0)))
    square = b.fmul(s, s)
    series = b.fmul(square, polynomial(e, _LOG64, square))
    half = b.fmul(b.fmul(f, f), e.const(0.5))
    low = e.fma(s, b.fadd(half, series), b.fmul(n, e.const(1.90821492927058770002e-10)))
    return b.fmul(n, e.const(6.93147180369123816490e-01)), b.fsub(low, half)


def tanh(e: Emitter, x: Value) -> Value:
    """Odd polynomial near 0, 1 - 2 / (exp(2 |x|) + 1) elsewhere."""
    return soft_cap(e, e.const(1.0), x, x)


def soft_cap(e: Emitter, cap: Value, x: Value, ratio: Value) -> Value:
    """cap * tanh(ratio), where `ratio` is x / cap, rounded. Near 0 it is x plus a small term."""
    b, form = e.builder, _format(e)
    magnitude = e.intrinsic("fabs", ratio)
    square = b.fmul(ratio, ratio)
    if e.real == FLOAT:
        tail = polynomial(e, _TANH32, square)
    else:
        above, below = (polynomial(e, part, square) for part in _TANH64)
        tail = b.fdiv(above, below)
    near = e.fma(b.fmul(tail, square), x, x)
    # 2 |ratio| is limited so that exp does not overflow; NaN stays NaN.
    doubled = b.fadd(magnitude, magnitude)
    doubled = b.select(b.fcmp_ordered(">", doubled, e.const(40.0)), e.const(40.0), doubled)
    fraction, exponent = _split_exp(e, doubled)
    power = e.as_floats(b.shl(exponent, e.const_bits(form.fraction)))
    quotient = b.fdiv(e.const(-2.0), e.fma(fraction, power, e.const(1.0)))
    sign = b.and_(e.as_bits(ratio), e.as_bits(e.const(-0.0)))
    far = e.as_floats(b.xor(e.as_bits(e.fma(quotient, cap, cap)), sign))
    return b.select(b.fcmp_ordered("<", magnitude, e.const(0.625)), near, far)
