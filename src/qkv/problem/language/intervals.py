"""Intervals, and what each operation of the language does to them.

Values lie inside whether they are computed in float32 or in float64, and integers although they may
wrap around in int64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Interval:
    """Smallest and largest value, inclusive; 0 and 1 for conditions. `nan`: it may be NaN too."""

    low: Array
    high: Array
    nan: Array | bool = False

    @classmethod
    def of(cls, low: Any, high: Any) -> Interval:
        return cls(np.asarray(low), np.asarray(high))


UNKNOWN = Interval(np.asarray(-np.inf), np.asarray(np.inf), nan=True)

FLOAT32_MAX = float(np.finfo(np.float32).max)
ROUNDING = 2.0**-20
"""Larger than the relative error of any one operation in float32."""
TINY = 2.0**-148
"""Larger than what a result loses by underflow in float32."""
EXACT = 2.0**53
"""Integers below this are exact in float64; beyond it, results may wrap around in int64."""


def constant_interval(value: float) -> Interval:
    if value != value:
        return UNKNOWN
    exact = Interval.of(value, value)
    return exact if isinstance(value, int) or float(np.float32(value)) == value else rounded(exact)


def int_bounds(a: Interval) -> Interval:
    """Bounds of integers in float64, all of int64 where they are too large to be exact."""
    low, high = np.asarray(a.low, float), np.asarray(a.high, float)
    return Interval(
        np.where(abs(low) < EXACT, low, -(2.0**63)), np.where(abs(high) < EXACT, high, 2.0**63)
    )


def wrapped(a: Interval) -> Interval:
    """A result of integer arithmetic, which may be anything where it may have wrapped around."""
    safe = np.maximum(abs(a.low), abs(a.high)) < EXACT
    return Interval(np.where(safe, a.low, -(2.0**63)), np.where(safe, a.high, 2.0**63))


def int_to_float(a: Interval) -> Interval:
    """Integers converted to floating point, which float32 rounds beyond 2**24."""
    low, high = np.asarray(a.low, float), np.asarray(a.high, float)
    near = np.maximum(np.abs(low), np.abs(high)) <= 2.0**24
    wide = rounded(Interval(low, high))
    return Interval(np.where(near, low, wide.low), np.where(near, high, wide.high))


def rounded(a: Interval) -> Interval:
    """Room for the rounding, overflow and underflow of float32; none of them changes a sign."""
    low, high = _widened(a)
    return Interval(
        np.where(low < -FLOAT32_MAX, -np.inf, low),
        np.where(high > FLOAT32_MAX, np.inf, high),
        a.nan,
    )


def narrowed(a: Interval) -> Interval:
    """Elements of a float64 table, which are rounded to float32 but stay finite."""
    low, high = _widened(a)
    return Interval(
        np.where(np.isinf(a.low), a.low, np.minimum(low, FLOAT32_MAX)),
        np.where(np.isinf(a.high), a.high, np.maximum(high, -FLOAT32_MAX)),
        a.nan,
    )


def _widened(a: Interval) -> tuple[Array, Array]:
    low = a.low - np.where(np.isfinite(a.low), abs(a.low) * ROUNDING + TINY, 0)
    high = a.high + np.where(np.isfinite(a.high), abs(a.high) * ROUNDING + TINY, 0)
    return np.where(a.low >= 0, np.maximum(low, 0), low), np.where(
        a.high <= 0, np.minimum(high, 0), high
    )


def _from_corners(combine: Callable[[Array, Array], Array], a: Interval, b: Interval) -> Interval:
    values = [combine(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    values = [np.where(np.isnan(v), 0, v) for v in values]
    return Interval(np.minimum.reduce(values), np.maximum.reduce(values), _has_nan(a, b))


def _has_nan(a: Interval, b: Interval) -> Any:
    return np.logical_or(a.nan, b.nan)


def _has_inf(a: Interval) -> Any:
    return np.isinf(a.low) | np.isinf(a.high)


def _has_zero(a: Interval) -> Any:
    return (a.low <= 0) & (a.high >= 0)


def _add(a: Interval, b: Interval) -> Interval:
    opposite = (np.isposinf(a.high) & np.isneginf(b.low)) | (
        np.isneginf(a.low) & np.isposinf(b.high)
    )
    low, high = a.low + b.low, a.high + b.high
    return Interval(
        np.where(np.isnan(low), -np.inf, low),
        np.where(np.isnan(high), np.inf, high),
        _has_nan(a, b) | opposite,
    )


def _multiply(a: Interval, b: Interval) -> Interval:
    product = _from_corners(np.multiply, a, b)
    zero_by_infinite = (_has_zero(a) & _has_inf(b)) | (_has_zero(b) & _has_inf(a))
    return Interval(product.low, product.high, product.nan | zero_by_infinite)


def _divide(a: Interval, b: Interval) -> Interval:
    if _has_zero(b).any():
        return UNKNOWN
    quotient = _from_corners(np.divide, a, b)
    return Interval(quotient.low, quotient.high, quotient.nan | (_has_inf(a) & _has_inf(b)))


def _quotient(a: Interval, b: Interval) -> Interval:
    # A divisor is never below 1. Where its lower bound is, the divisor is beyond `EXACT`, and its
    # bounds were widened to those of all integers.
    return _from_corners(np.floor_divide, a, Interval(np.where(b.low < 1, EXACT, b.low), b.high))


def _remainder(a: Interval, b: Interval) -> Interval:
    inside = (a.low // b.low == a.high // b.low) & (b.low == b.high)
    return Interval(
        np.where(inside, np.mod(a.low, b.low), 0),
        np.where(inside, np.mod(a.high, b.low), b.high - 1),
    )


def _absolute(a: Interval) -> Interval:
    low = np.where(a.low > 0, a.low, np.where(a.high < 0, -a.high, 0))
    return Interval(low, np.maximum(-a.low, a.high), a.nan)


def _negative(a: Interval) -> Interval:
    return Interval(-a.high, -a.low, a.nan)


def _comparison(certain: Any, possible: Any, a: Interval, b: Interval) -> Interval:
    """Bounds of a comparison: where an argument may be NaN, it may be False."""
    return Interval.of((certain & ~_has_nan(a, b)) * 1, possible * 1)


def _equal(a: Interval, b: Interval) -> Interval:
    same = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return _comparison(same, (a.high >= b.low) & (b.high >= a.low), a, b)


def _not(a: Interval) -> Interval:
    return Interval(1 - a.high, 1 - a.low)


def _where(c: Interval, a: Interval, b: Interval) -> Interval:
    low = np.where(c.low >= 1, a.low, np.where(c.high <= 0, b.low, np.minimum(a.low, b.low)))
    high = np.where(c.low >= 1, a.high, np.where(c.high <= 0, b.high, np.maximum(a.high, b.high)))
    nan = ((c.high >= 1) & np.asarray(a.nan)) | ((c.low <= 0) & np.asarray(b.nan))
    return Interval(low, high, nan)


def _pairwise(function: Callable[[Array, Array], Array]) -> Callable[..., Interval]:
    return lambda a, b: Interval(function(a.low, b.low), function(a.high, b.high), _has_nan(a, b))


def _increasing(function: Callable[[Array], Array], least: float) -> Callable[[Interval], Interval]:
    """The rule of an increasing function that is NaN where it is not defined."""

    def rule(a: Interval) -> Interval:
        low, high = function(np.asarray(a.low, float)), function(np.asarray(a.high, float))
        undefined = np.isnan(low)
        return Interval(
            np.where(undefined, least, low), np.where(np.isnan(high), np.inf, high),
            np.logical_or(a.nan, undefined),
        )  # fmt: skip

    return rule


def _floor(a: Interval) -> Interval:
    """Saturates, and turns NaN into 0, as `evaluate` does."""
    limit = float(2**62)
    low = np.clip(np.floor(np.asarray(a.low, float)), -limit, limit)
    high = np.clip(np.floor(np.asarray(a.high, float)), -limit, limit)
    return Interval(
        np.where(a.nan, np.minimum(low, 0), low), np.where(a.nan, np.maximum(high, 0), high)
    )


RULES: Mapping[str, Callable[..., Interval]] = {
    "add": _add,
    "sub": lambda a, b: _add(a, _negative(b)),
    "mul": _multiply,
    "div": _divide,
    "floordiv": _quotient,
    "mod": _remainder,
    "min": _pairwise(np.minimum),
    "max": _pairwise(np.maximum),
    "neg": _negative,
    "abs": _absolute,
    "lt": lambda a, b: _comparison(a.high < b.low, a.low < b.high, a, b),
    "le": lambda a, b: _comparison(a.high <= b.low, a.low <= b.high, a, b),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "and": _pairwise(np.minimum),
    "or": _pairwise(np.maximum),
    "not": _not,
    "where": _where,
    "exp": _increasing(np.exp, 0.0),
    "log": _increasing(np.log, -np.inf),
    "sqrt": _increasing(np.sqrt, 0.0),
    "tanh": _increasing(np.tanh, -1.0),
    "floor": _floor,
}

ROUNDS = {"add", "sub", "mul", "div", "neg", "abs", "exp", "log", "sqrt", "tanh"}
"""Operations that round, or of integers wrap around; the others are exact."""
