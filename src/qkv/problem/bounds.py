"""Interval arithmetic on expressions: what a mask can be over a whole tile, or an index at all.

All tiles of a grid are bounded at once. The bounds of a variable are arrays that broadcast with
one another: query rows as a column, key rows as a row, batch and head as scalars. Bounds are
conservative: the values lie inside whether they are computed in float32 or in float64, and a
condition is `[1, 1]` or `[0, 0]` only when every pair of the tile agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ArgumentError, ShapeError
from qkv.problem.expressions import Const, Load, Node, Op, Var, text, walk

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


_UNKNOWN = Interval(np.asarray(-np.inf), np.asarray(np.inf), nan=True)

FLOAT32_MAX = float(np.finfo(np.float32).max)
ROUNDING = 2.0**-20
"""More than one operation errs in float32, relative to its result."""
TINY = 2.0**-148
"""More than what underflow takes away."""
EXACT = 2.0**53
"""Integers below this are themselves in float64; those beyond may wrap around in int64."""


def bound(
    node: Node,
    variables: Mapping[str, Interval],
    tables: Mapping[str, Array],
) -> Interval:
    """Bounds of `node` for every tile.

    Raises
    ------
    ShapeError
        If a table could be read outside its shape.
    ArgumentError
        If an integer division or remainder could meet a divisor below one.
    """
    known: dict[Node, Interval] = {}

    def interval(n: Node) -> Interval:
        found = known.get(n)
        if found is None:
            with np.errstate(all="ignore"):
                found = known[n] = compute(n)
        return found

    def compute(n: Node) -> Interval:
        match n:
            case Const(value=value):
                return _constant(value)
            case Var(name=name):
                return variables.get(name, _UNKNOWN)
            case Load():
                return _table_bounds(n, tables[n.table], [interval(i) for i in n.indices])
            case Op():
                args = [interval(arg) for arg in n.args]
                if n.name in ("floordiv", "mod") and not (args[1].low >= 1).all():
                    raise ArgumentError(
                        "an integer division may meet a divisor below 1.",
                        [("expression", text(n))],
                        "Divide by a positive constant, or np.maximum(divisor, 1).",
                    )
                kinds = [arg.kind for arg in n.args]
                if n.kind == "int" and n.name != "floor":
                    args = [
                        _whole(a) if k == "int" else a for a, k in zip(args, kinds, strict=True)
                    ]
                elif n.kind == "float" or "float" in kinds:
                    args = [_real(a) if k == "int" else a for a, k in zip(args, kinds, strict=True)]
                result = _RULES[n.name](*args)
                if n.name not in _ROUNDS:
                    return result
                return _wrapped(result) if n.kind == "int" else _rounded(result)

    return interval(node)


def _constant(value: float) -> Interval:
    if value != value:
        return _UNKNOWN
    exact = Interval.of(value, value)
    return exact if isinstance(value, int) or float(np.float32(value)) == value else _rounded(exact)


def _whole(a: Interval) -> Interval:
    """Integers as float64, which tells those below 2**53 apart."""
    low, high = np.asarray(a.low, float), np.asarray(a.high, float)
    return Interval(
        np.where(abs(low) < EXACT, low, -(2.0**63)), np.where(abs(high) < EXACT, high, 2.0**63)
    )


def _wrapped(a: Interval) -> Interval:
    """A result of integer arithmetic: one that may be too large may be anything."""
    safe = np.maximum(abs(a.low), abs(a.high)) < EXACT
    return Interval(np.where(safe, a.low, -(2.0**63)), np.where(safe, a.high, 2.0**63))


def _real(a: Interval) -> Interval:
    """Integers turned into floating numbers, which float32 rounds beyond 2**24."""
    low, high = np.asarray(a.low, float), np.asarray(a.high, float)
    near = np.maximum(np.abs(low), np.abs(high)) <= 2.0**24
    wide = _rounded(Interval(low, high))
    return Interval(np.where(near, low, wide.low), np.where(near, high, wide.high))


def _rounded(a: Interval) -> Interval:
    """Room for the rounding, overflow and underflow of float32; none of them changes a sign."""
    low, high = _widened(a)
    return Interval(
        np.where(low < -FLOAT32_MAX, -np.inf, low),
        np.where(high > FLOAT32_MAX, np.inf, high),
        a.nan,
    )


def _narrowed(a: Interval) -> Interval:
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


def prove_reads(node: Node, variables: Mapping[str, Interval], tables: Mapping[str, Array]) -> None:
    """Raise as `bound` does, without reading the tables that only give values."""
    for n in walk(node):
        match n:
            case Load(table=table, indices=indices):
                known = [bound(i, variables, tables) for i in indices]
                _check_indices(n, tables[table], known)
            case Op(name="floordiv" | "mod"):
                bound(n, variables, tables)


def _check_indices(load: Load, table: Array, indices: list[Interval]) -> None:
    for axis, (index, size) in enumerate(zip(indices, table.shape, strict=True)):
        low, high = index.low.min(), index.high.max()
        if low < 0 or high >= size:
            raise ShapeError(
                f"index {axis} of table {load.table} may reach {low:g} to {high:g}; "
                f"it has {size} entries there.",
                [("index", text(load.indices[axis])), ("table shape", str(table.shape))],
                "Keep it inside with np.clip(index, 0, size - 1), or pass a larger array.",
            )


def _table_bounds(load: Load, table: Array, indices: list[Interval]) -> Interval:
    _check_indices(load, table, indices)
    return _reduce(table, indices)


def _reduce(table: Array, indices: list[Interval]) -> Interval:
    """Minimum and maximum of the table over the product of index ranges.

    Each index that depends on the query tile only, on the key tile only, or on neither, is reduced
    exactly; one that mixes them takes the whole axis.
    """
    low = high = table
    column_axes = row_axes = 0
    kept: list[str] = []
    for index in indices:
        axis = len(kept)
        lo, hi = np.broadcast_arrays(index.low, index.high)
        rows, columns = (lo.shape + (1, 1))[:2] if lo.ndim == 2 else (1, 1)
        if rows > 1 and columns > 1:
            low, high = _least(low, axis), _greatest(high, axis)
            continue
        starts, ends = lo.reshape(-1).astype(np.intp), hi.reshape(-1).astype(np.intp)
        before = (slice(None),) * axis
        if len(starts) == 1 and starts[0] == ends[0]:
            low, high = low[(*before, starts[0])], high[(*before, starts[0])]
        elif len(starts) == 1:
            part = (*before, slice(starts[0], ends[0] + 1))
            low, high = _least(low[part], axis), _greatest(high[part], axis)
        else:
            low, high = (
                _ranges(low, axis, starts, ends, np.minimum),
                _ranges(high, axis, starts, ends, np.maximum),
            )
            kept.append("rows" if rows > 1 else "columns")
            column_axes += rows > 1
            row_axes += columns > 1
    if column_axes > 1 or row_axes > 1:
        # The same tile coordinate indexes two axes; the product of ranges is still an outer bound.
        low, high = _least(low.reshape(-1), 0), _greatest(high.reshape(-1), 0)
        kept = []
    if kept == ["columns"]:
        low, high = low[None, :], high[None, :]
    elif kept == ["rows"]:
        low, high = low[:, None], high[:, None]
    elif kept == ["columns", "rows"]:
        low, high = low.T, high.T
    if low.dtype.kind in "bi":
        return Interval(low.astype(np.int64), high.astype(np.int64))
    wide = table.dtype.kind == "f" and table.dtype.itemsize > 4
    low, high = low.astype(np.float64), high.astype(np.float64)
    nan = np.isnan(low)
    found = Interval(np.where(nan, -np.inf, low), np.where(nan, np.inf, high), nan)
    return _narrowed(found) if wide else found


def _least(a: Array, axis: int) -> Array:
    return np.asarray(np.minimum.reduce(a, axis=axis) if a.dtype != bool else a.all(axis=axis))


def _greatest(a: Array, axis: int) -> Array:
    return np.asarray(np.maximum.reduce(a, axis=axis) if a.dtype != bool else a.any(axis=axis))


def _ranges(a: Array, axis: int, starts: Array, ends: Array, smaller: np.ufunc) -> Array:
    """Reduce the inclusive ranges [starts[i], ends[i]] of one axis."""
    size = a.shape[axis]
    if a.dtype == bool:
        smaller = np.logical_and if smaller is np.minimum else np.logical_or
    step = int(ends[0] - starts[0]) + 1
    side_by_side = np.arange(0, size, step)[: len(starts)]
    if np.array_equal(starts, side_by_side) and np.array_equal(
        ends, np.minimum(side_by_side + step, size) - 1
    ):
        # As the tiles of a grid are; a plain reduction is ten times faster.
        return _blocks(a, axis, step, len(starts), smaller)
    pairs = np.stack([starts, ends + 1], axis=1).reshape(-1)
    # reduceat takes no index equal to the size: the last pair may end with the array instead,
    # others are padded with a copy of the last element.
    if pairs[-1] == size:
        pairs = pairs[:-1]
    if (pairs >= size).any():
        last = np.take(a, [size - 1], axis=axis)
        a = np.concatenate([a, last], axis=axis)
    reduced = smaller.reduceat(a, pairs, axis=axis)
    return np.asarray(np.take(reduced, np.arange(0, len(pairs), 2), axis=axis))


def _blocks(a: Array, axis: int, step: int, count: int, smaller: np.ufunc) -> Array:
    """Reduce `count` neighbouring blocks of one axis, of which the last may be short."""
    whole = min(count, a.shape[axis] // step)
    before = (slice(None),) * axis
    shape = (*a.shape[:axis], whole, step, *a.shape[axis + 1 :])
    reduced = smaller.reduce(a[(*before, slice(0, whole * step))].reshape(shape), axis=axis + 1)
    if whole == count:
        return np.asarray(reduced)
    short = smaller.reduce(a[(*before, slice(whole * step, None))], axis=axis, keepdims=True)
    return np.concatenate([reduced, short], axis=axis)


def _corners(combine: Callable[[Array, Array], Array], a: Interval, b: Interval) -> Interval:
    values = [combine(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    values = [np.where(np.isnan(v), 0, v) for v in values]
    return Interval(np.minimum.reduce(values), np.maximum.reduce(values), _either(a, b))


def _either(a: Interval, b: Interval) -> Any:
    return np.logical_or(a.nan, b.nan)


def _infinite(a: Interval) -> Any:
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
        _either(a, b) | opposite,
    )


def _multiply(a: Interval, b: Interval) -> Interval:
    product = _corners(np.multiply, a, b)
    zero_by_infinite = (_has_zero(a) & _infinite(b)) | (_has_zero(b) & _infinite(a))
    return Interval(product.low, product.high, product.nan | zero_by_infinite)


def _divide(a: Interval, b: Interval) -> Interval:
    if _has_zero(b).any():
        return _UNKNOWN
    quotient = _corners(np.divide, a, b)
    return Interval(quotient.low, quotient.high, quotient.nan | (_infinite(a) & _infinite(b)))


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


def _compare(certain: Any, possible: Any, a: Interval, b: Interval) -> Interval:
    """A comparison with NaN is False."""
    return Interval.of((certain & ~_either(a, b)) * 1, possible * 1)


def _equal(a: Interval, b: Interval) -> Interval:
    same = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return _compare(same, (a.high >= b.low) & (b.high >= a.low), a, b)


def _not(a: Interval) -> Interval:
    return Interval(1 - a.high, 1 - a.low)


def _where(c: Interval, a: Interval, b: Interval) -> Interval:
    low = np.where(c.low >= 1, a.low, np.where(c.high <= 0, b.low, np.minimum(a.low, b.low)))
    high = np.where(c.low >= 1, a.high, np.where(c.high <= 0, b.high, np.maximum(a.high, b.high)))
    nan = ((c.high >= 1) & np.asarray(a.nan)) | ((c.low <= 0) & np.asarray(b.nan))
    return Interval(low, high, nan)


def _pairwise(function: Callable[[Array, Array], Array]) -> Callable[..., Interval]:
    return lambda a, b: Interval(function(a.low, b.low), function(a.high, b.high), _either(a, b))


def _rising(function: Callable[[Array], Array], least: float) -> Callable[[Interval], Interval]:
    """A function that grows, and is NaN where it is not defined."""

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


_RULES: Mapping[str, Callable[..., Interval]] = {
    "add": _add,
    "sub": lambda a, b: _add(a, _negative(b)),
    "mul": _multiply,
    "div": _divide,
    "floordiv": partial(_corners, np.floor_divide),
    "mod": _remainder,
    "min": _pairwise(np.minimum),
    "max": _pairwise(np.maximum),
    "neg": _negative,
    "abs": _absolute,
    "lt": lambda a, b: _compare(a.high < b.low, a.low < b.high, a, b),
    "le": lambda a, b: _compare(a.high <= b.low, a.low <= b.high, a, b),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "and": _pairwise(np.minimum),
    "or": _pairwise(np.maximum),
    "not": _not,
    "where": _where,
    "exp": _rising(np.exp, 0.0),
    "log": _rising(np.log, -np.inf),
    "sqrt": _rising(np.sqrt, 0.0),
    "tanh": _rising(np.tanh, -1.0),
    "floor": _floor,
}

_ROUNDS = {"add", "sub", "mul", "div", "neg", "abs", "exp", "log", "sqrt", "tanh"}
"""Operations that round, or wrap around; the others give one of their arguments or less."""
