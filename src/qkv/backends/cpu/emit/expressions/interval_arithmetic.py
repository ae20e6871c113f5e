"""Interval arithmetic in machine code: bounds of an operation from the bounds of its arguments.

The rules are those of `qkv.problem.language.intervals`, with the same room for rounding. The bounds
of a number are two float64 numbers and a bit that says whether it may be NaN; those of a condition
are two bits, whether it certainly holds and whether it possibly does. Two things are bounded less
tightly than there: exponentials, logarithms and hyperbolic tangents have no bounds at all, and
neither have integers beyond 2**53.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, DOUBLE, Emitter, Value
from qkv.problem.language.intervals import EXACT, FLOAT32_MAX, ROUNDING, TINY

_INTEGER_LIMIT = 2.0**63
_FLOOR_LIMIT = 2.0**62


class Bounds(NamedTuple):
    """Smallest and largest value as float64, and whether it may be NaN."""

    low: Value
    high: Value
    nan: Value


class Truth(NamedTuple):
    """Whether a condition certainly holds, and whether it possibly does."""

    certain: Value
    possible: Value


def constant(value: float) -> Value:
    return ir.Constant(DOUBLE, value)


def bool_constant(value: bool) -> Value:
    return ir.Constant(BIT, int(value))


def constant_bounds(low: float, high: float, nan: bool = False) -> Bounds:
    return Bounds(constant(low), constant(high), bool_constant(nan))


ANY_VALUE = constant_bounds(-math.inf, math.inf, nan=True)


class IntervalArithmetic:
    """Emits operations on bounds."""

    def __init__(self, e: Emitter) -> None:
        self.e = e

    def apply(self, name: str, *bounds: Bounds) -> Bounds:
        """The bounds of an operation on numbers, as if it did not round."""
        return self._RULES[name](self, *bounds)

    # --- Conditions ------------------------------------------------------------------------------

    def combine_conditions(self, name: str, args: list[Truth]) -> Truth:
        b = self.e.builder
        if name == "not":
            (a,) = args
            return Truth(b.not_(a.possible), b.not_(a.certain))
        combine = b.and_ if name == "and" else b.or_
        return Truth(*(combine(x, y) for x, y in zip(*args, strict=True)))

    def where_condition(self, condition: Truth, first: Truth, second: Truth) -> Truth:
        """`where_number` for conditions, taken as 0 and 1."""
        b, never = self.e.builder, self.e.builder.not_(condition.possible)
        certain = b.select(never, second.certain, b.and_(first.certain, second.certain))
        possible = b.select(never, second.possible, b.or_(first.possible, second.possible))
        return Truth(
            b.select(condition.certain, first.certain, certain),
            b.select(condition.certain, first.possible, possible),
        )

    def where_number(self, condition: Truth, first: Bounds, second: Bounds) -> Bounds:
        b, never = self.e.builder, self.e.builder.not_(condition.possible)
        low = b.select(never, second.low, self.least(first.low, second.low))
        high = b.select(never, second.high, self.greatest(first.high, second.high))
        nan = b.or_(
            b.and_(condition.possible, first.nan), b.and_(b.not_(condition.certain), second.nan)
        )
        return Bounds(
            b.select(condition.certain, first.low, low),
            b.select(condition.certain, first.high, high),
            nan,
        )

    def compare(self, name: str, a: Bounds, c: Bounds) -> Truth:
        """A comparison with NaN is false, and `ne` with it is true."""
        b = self.e.builder
        if name in ("eq", "ne"):
            same = self._all_of(
                b.fcmp_ordered("==", a.low, a.high),
                b.fcmp_ordered("==", c.low, c.high),
                b.fcmp_ordered("==", a.low, c.low),
            )
            overlap = b.and_(
                b.fcmp_ordered(">=", a.high, c.low), b.fcmp_ordered(">=", c.high, a.low)
            )
            truth = Truth(same, overlap)
        else:
            sign = "<" if name == "lt" else "<="
            truth = Truth(b.fcmp_ordered(sign, a.high, c.low), b.fcmp_ordered(sign, a.low, c.high))
        truth = truth._replace(certain=b.and_(truth.certain, b.not_(b.or_(a.nan, c.nan))))
        return self.combine_conditions("not", [truth]) if name == "ne" else truth

    # --- Numbers ---------------------------------------------------------------------------------

    def _add(self, a: Bounds, c: Bounds) -> Bounds:
        b = self.e.builder
        low, high = b.fadd(a.low, c.low), b.fadd(a.high, c.high)
        opposite = b.or_(
            b.and_(self._equals(a.high, math.inf), self._equals(c.low, -math.inf)),
            b.and_(self._equals(a.low, -math.inf), self._equals(c.high, math.inf)),
        )
        return Bounds(
            self._replace_nan(low, -math.inf),
            self._replace_nan(high, math.inf),
            b.or_(b.or_(a.nan, c.nan), opposite),
        )

    def _multiply(self, a: Bounds, c: Bounds) -> Bounds:
        b = self.e.builder
        low, high = self._corner_extremes(b.fmul, a, c)
        zero_by_infinite = b.or_(
            b.and_(self._may_be_zero(a), self._may_be_infinite(c)),
            b.and_(self._may_be_zero(c), self._may_be_infinite(a)),
        )
        return Bounds(low, high, b.or_(b.or_(a.nan, c.nan), zero_by_infinite))

    def _divide(self, a: Bounds, c: Bounds) -> Bounds:
        b = self.e.builder
        low, high = self._corner_extremes(b.fdiv, a, c)
        nan = b.or_(b.or_(a.nan, c.nan), b.and_(self._may_be_infinite(a), self._may_be_infinite(c)))
        return self._any_value_if(self._may_be_zero(c), Bounds(low, high, nan))

    def _floor_divide(self, a: Bounds, c: Bounds) -> Bounds:
        """Divisors are 1 or more. The rounded quotient of exact integers never crosses an integer,
        so that its floor is exact; a bound that is not exact stays as it is."""
        b = self.e.builder

        def quotient(x: Value, y: Value) -> Value:
            floor = self._intrinsic("floor", b.fdiv(x, y))
            return b.select(self._is_exact(x), floor, x)

        low, high = self._corner_extremes(quotient, a, c)
        return self._any_value_if(
            self._may_be_below_one(c), Bounds(low, high, bool_constant(False))
        )

    def _remainder(self, a: Bounds, c: Bounds) -> Bounds:
        b, one = self.e.builder, constant(1.0)
        first, last = (self._intrinsic("floor", b.fdiv(x, c.low)) for x in (a.low, a.high))
        small = [
            b.fcmp_ordered("<", self._intrinsic("fabs", x), constant(EXACT / 2))
            for x in (a.low, a.high, c.low)
        ]
        inside = self._all_of(
            b.fcmp_ordered("==", first, last), b.fcmp_ordered("==", c.low, c.high), *small
        )
        start = b.fmul(first, c.low)
        low = b.select(inside, b.fsub(a.low, start), constant(0.0))
        high = b.select(inside, b.fsub(a.high, start), b.fsub(c.high, one))
        return self._any_value_if(
            self._may_be_below_one(c), Bounds(low, high, bool_constant(False))
        )

    def _minimum(self, a: Bounds, c: Bounds) -> Bounds:
        nan = self.e.builder.or_(a.nan, c.nan)
        return Bounds(self.least(a.low, c.low), self.least(a.high, c.high), nan)

    def _maximum(self, a: Bounds, c: Bounds) -> Bounds:
        nan = self.e.builder.or_(a.nan, c.nan)
        return Bounds(self.greatest(a.low, c.low), self.greatest(a.high, c.high), nan)

    def _negative(self, a: Bounds) -> Bounds:
        b = self.e.builder
        return Bounds(b.fneg(a.high), b.fneg(a.low), a.nan)

    def _subtract(self, a: Bounds, c: Bounds) -> Bounds:
        return self._add(a, self._negative(c))

    def _absolute(self, a: Bounds) -> Bounds:
        b, zero = self.e.builder, constant(0.0)
        below = b.select(b.fcmp_ordered("<", a.high, zero), b.fneg(a.high), zero)
        low = b.select(b.fcmp_ordered(">", a.low, zero), a.low, below)
        return Bounds(low, self.greatest(b.fneg(a.low), a.high), a.nan)

    def _square_root(self, a: Bounds) -> Bounds:
        b = self.e.builder
        low, high = self._intrinsic("sqrt", a.low), self._intrinsic("sqrt", a.high)
        return Bounds(
            self._replace_nan(low, 0.0),
            self._replace_nan(high, math.inf),
            b.or_(a.nan, self.e.is_nan(low)),
        )

    def _floor(self, a: Bounds) -> Bounds:
        """Saturates, and turns NaN into 0, as `evaluate` does."""
        b, zero = self.e.builder, constant(0.0)
        limit = constant(_FLOOR_LIMIT)
        low, high = (
            self.greatest(self.least(self._intrinsic("floor", x), limit), constant(-_FLOOR_LIMIT))
            for x in (a.low, a.high)
        )
        return Bounds(
            b.select(a.nan, self.least(low, zero), low),
            b.select(a.nan, self.greatest(high, zero), high),
            bool_constant(False),
        )

    def _any_value(self, _: Bounds) -> Bounds:
        return ANY_VALUE

    _RULES: Mapping[str, Callable[..., Bounds]] = {
        "add": _add, "sub": _subtract, "mul": _multiply, "div": _divide,
        "floordiv": _floor_divide, "mod": _remainder, "min": _minimum, "max": _maximum,
        "neg": _negative, "abs": _absolute, "sqrt": _square_root, "floor": _floor,
        "exp": _any_value, "log": _any_value, "tanh": _any_value,
    }  # fmt: skip

    # --- Margins for rounding, and for integers that wrap around ---------------------------------

    def exact_integers(self, a: Bounds) -> Bounds:
        """Bounds that float64 holds exactly; beyond 2**53 only the bounds of int64 are known."""
        b = self.e.builder
        return Bounds(
            b.select(self._is_exact(a.low), a.low, constant(-_INTEGER_LIMIT)),
            b.select(self._is_exact(a.high), a.high, constant(_INTEGER_LIMIT)),
            a.nan,
        )

    def unless_wrapped(self, a: Bounds) -> Bounds:
        """The bounds of a sum or product, unless either is so large that the integer may wrap."""
        b = self.e.builder
        safe = b.and_(self._is_exact(a.low), self._is_exact(a.high))
        return Bounds(
            b.select(safe, a.low, constant(-_INTEGER_LIMIT)),
            b.select(safe, a.high, constant(_INTEGER_LIMIT)),
            a.nan,
        )

    def as_float(self, a: Bounds) -> Bounds:
        """Bounds of an integer that is converted to float32, which rounds it beyond 2**24."""
        b, limit = self.e.builder, constant(2.0**24)
        near = self._all_of(
            *(b.fcmp_ordered("<=", self._intrinsic("fabs", x), limit) for x in (a.low, a.high))
        )
        wide = self.rounded(a)
        return Bounds(b.select(near, a.low, wide.low), b.select(near, a.high, wide.high), a.nan)

    def rounded(self, a: Bounds) -> Bounds:
        """Bounds with a margin for the rounding, overflow and underflow of float32."""
        b = self.e.builder
        low, high = self._with_margin(a)
        beneath = b.fcmp_ordered("<", low, constant(-FLOAT32_MAX))
        above = b.fcmp_ordered(">", high, constant(FLOAT32_MAX))
        return Bounds(
            b.select(beneath, constant(-math.inf), low),
            b.select(above, constant(math.inf), high),
            a.nan,
        )

    def as_float32(self, a: Bounds) -> Bounds:
        """Bounds of elements of a float64 table, rounded to float32; finite ones stay finite."""
        b = self.e.builder
        low, high = self._with_margin(a)
        infinite = [self._equals(self._intrinsic("fabs", x), math.inf) for x in (a.low, a.high)]
        return Bounds(
            b.select(infinite[0], a.low, self.least(low, constant(FLOAT32_MAX))),
            b.select(infinite[1], a.high, self.greatest(high, constant(-FLOAT32_MAX))),
            a.nan,
        )

    def _with_margin(self, a: Bounds) -> tuple[Value, Value]:
        b, zero = self.e.builder, constant(0.0)

        def margin(x: Value) -> Value:
            size = self._intrinsic("fabs", x)
            wide = b.fadd(b.fmul(size, constant(ROUNDING)), constant(TINY))
            return b.select(b.fcmp_ordered("<", size, constant(math.inf)), wide, zero)

        low, high = b.fsub(a.low, margin(a.low)), b.fadd(a.high, margin(a.high))
        positive = b.fcmp_ordered(">=", a.low, zero)
        negative = b.fcmp_ordered("<=", a.high, zero)
        return (
            b.select(positive, self.greatest(low, zero), low),
            b.select(negative, self.least(high, zero), high),
        )

    # --- Parts of the rules ----------------------------------------------------------------------

    def _corner_extremes(
        self, combine: Callable[[Value, Value], Value], a: Bounds, c: Bounds
    ) -> tuple[Value, Value]:
        """Smallest and largest result for the bounds of both arguments; 0 where one is NaN."""
        values = [
            self._replace_nan(combine(x, y), 0.0) for x in (a.low, a.high) for y in (c.low, c.high)
        ]
        low = high = values[0]
        for value in values[1:]:
            low, high = self.least(low, value), self.greatest(high, value)
        return low, high

    def _any_value_if(self, condition: Value, bounds: Bounds) -> Bounds:
        """`ANY_VALUE` where the condition holds, else `bounds`."""
        b = self.e.builder
        return Bounds(*(b.select(condition, x, y) for x, y in zip(ANY_VALUE, bounds, strict=True)))

    def _replace_nan(self, x: Value, otherwise: float) -> Value:
        return self.e.builder.select(self.e.is_nan(x), constant(otherwise), x)

    def least(self, x: Value, y: Value) -> Value:
        return self.e.builder.select(self.e.builder.fcmp_ordered("<", y, x), y, x)

    def greatest(self, x: Value, y: Value) -> Value:
        return self.e.builder.select(self.e.builder.fcmp_ordered(">", y, x), y, x)

    def _equals(self, x: Value, number: float) -> Value:
        return self.e.builder.fcmp_ordered("==", x, constant(number))

    def _is_exact(self, x: Value) -> Value:
        return self.e.builder.fcmp_ordered("<", self._intrinsic("fabs", x), constant(EXACT))

    def _may_be_below_one(self, a: Bounds) -> Value:
        return self.e.builder.fcmp_ordered("<", a.low, constant(1.0))

    def _may_be_zero(self, a: Bounds) -> Value:
        b, zero = self.e.builder, constant(0.0)
        return b.and_(b.fcmp_ordered("<=", a.low, zero), b.fcmp_ordered(">=", a.high, zero))

    def _may_be_infinite(self, a: Bounds) -> Value:
        return self.e.builder.or_(
            *(self._equals(self._intrinsic("fabs", x), math.inf) for x in (a.low, a.high))
        )

    def _intrinsic(self, name: str, x: Value) -> Value:
        return self.e.intrinsic(name, x)

    def _all_of(self, *conditions: Value) -> Value:
        all_hold = conditions[0]
        for condition in conditions[1:]:
            all_hold = self.e.builder.and_(all_hold, condition)
        return all_hold
