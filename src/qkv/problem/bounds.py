"""Interval arithmetic on expressions: what a mask can be over a whole tile, or an index at all.

All tiles of a grid are bounded at once. The bounds of a variable are arrays that broadcast with
one another: query rows as a column, key rows as a row, batch and head as scalars. Bounds are
conservative: the true values lie inside, and a condition is `[1, 1]` or `[0, 0]` only when every
pair of the tile agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ArgumentError, ShapeError
from qkv.problem.expressions import Const, Load, Node, Op, Var, text, walk

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Interval:
    """Smallest and largest value, inclusive; 0 and 1 for conditions."""

    low: Array
    high: Array

    @classmethod
    def of(cls, low: Any, high: Any) -> Interval:
        return cls(np.asarray(low), np.asarray(high))


_UNKNOWN = Interval.of(-np.inf, np.inf)


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
                return Interval.of(value, value)
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
                return _RULES[n.name](*args)

    return interval(node)


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
        whole = len(starts) == 1
        if whole:
            part = (slice(None),) * axis + (slice(int(starts[0]), int(ends[0]) + 1),)
            low, high = _least(low[part], axis), _greatest(high[part], axis)
        else:
            low, high = (
                _ranges(low, axis, starts, ends, np.fmin),
                _ranges(high, axis, starts, ends, np.fmax),
            )
            kept.append("rows" if rows > 1 else "columns")
            column_axes += rows > 1
            row_axes += columns > 1
    if column_axes > 1 or row_axes > 1:
        # The same tile coordinate indexes two axes; the product of ranges is still an outer bound.
        return Interval.of(_least_all(low), _greatest_all(high))
    if kept == ["columns"]:
        low, high = low[None, :], high[None, :]
    elif kept == ["rows"]:
        low, high = low[:, None], high[:, None]
    elif kept == ["columns", "rows"]:
        low, high = low.T, high.T
    if low.dtype.kind not in "biu":
        low = low.astype(np.float64)
        high = high.astype(np.float64)
        # NaN alone tells nothing.
        low = np.where(np.isnan(low), -np.inf, low)
        high = np.where(np.isnan(high), np.inf, high)
    elif low.dtype.kind == "u":
        low, high = low.astype(np.float64), high.astype(np.float64)
    else:
        low, high = low.astype(np.int64), high.astype(np.int64)
    return Interval(np.asarray(low), np.asarray(high))


def _least(a: Array, axis: int) -> Array:
    return np.asarray(np.fmin.reduce(a, axis=axis) if a.dtype != bool else a.all(axis=axis))


def _greatest(a: Array, axis: int) -> Array:
    return np.asarray(np.fmax.reduce(a, axis=axis) if a.dtype != bool else a.any(axis=axis))


def _least_all(a: Array) -> Array:
    return np.asarray(np.fmin.reduce(a.reshape(-1)))


def _greatest_all(a: Array) -> Array:
    return np.asarray(np.fmax.reduce(a.reshape(-1)))


def _ranges(a: Array, axis: int, starts: Array, ends: Array, smaller: np.ufunc) -> Array:
    """Reduce the inclusive ranges [starts[i], ends[i]] of one axis."""
    size = a.shape[axis]
    if a.dtype == bool:
        smaller = np.logical_and if smaller is np.fmin else np.logical_or
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


def _corners(combine: Callable[[Array, Array], Array]) -> Callable[[Interval, Interval], Interval]:
    def rule(a: Interval, b: Interval) -> Interval:
        values = [combine(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        values = [np.where(np.isnan(v), 0, v) if v.dtype.kind == "f" else v for v in values]
        low, high = values[0], values[0]
        for v in values[1:]:
            low, high = np.minimum(low, v), np.maximum(high, v)
        return Interval(np.asarray(low), np.asarray(high))

    return rule


def _divide(a: Interval, b: Interval) -> Interval:
    if ((b.low > 0) | (b.high < 0)).all():
        return _corners(np.divide)(a, b)
    return _UNKNOWN


def _remainder(a: Interval, b: Interval) -> Interval:
    inside = (a.low // b.low == a.high // b.low) & (b.low == b.high)
    return Interval(
        np.where(inside, np.mod(a.low, b.low), 0),
        np.where(inside, np.mod(a.high, b.low), b.high - 1),
    )


def _absolute(a: Interval) -> Interval:
    low = np.where(a.low > 0, a.low, np.where(a.high < 0, -a.high, 0))
    return Interval(low, np.maximum(-a.low, a.high))


def _equal(a: Interval, b: Interval) -> Interval:
    same = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    apart = (a.high < b.low) | (b.high < a.low)
    return Interval.of(same.astype(np.int64), (~apart).astype(np.int64))


def _not(a: Interval) -> Interval:
    return Interval(1 - a.high, 1 - a.low)


def _where(c: Interval, a: Interval, b: Interval) -> Interval:
    low = np.where(c.low >= 1, a.low, np.where(c.high <= 0, b.low, np.minimum(a.low, b.low)))
    high = np.where(c.low >= 1, a.high, np.where(c.high <= 0, b.high, np.maximum(a.high, b.high)))
    return Interval(low, high)


def _rising(function: Callable[[Array], Array], below: float) -> Callable[[Interval], Interval]:
    def rule(a: Interval) -> Interval:
        low, high = function(np.asarray(a.low, float)), function(np.asarray(a.high, float))
        return Interval(np.where(np.isnan(low), below, low), np.where(np.isnan(high), np.inf, high))

    return rule


def _floor(a: Interval) -> Interval:
    limit = float(2**62)
    return Interval(
        np.clip(np.floor(np.asarray(a.low, float)), -limit, limit),
        np.clip(np.floor(np.asarray(a.high, float)), -limit, limit),
    )


_RULES: Mapping[str, Callable[..., Interval]] = {
    "add": lambda a, b: Interval(a.low + b.low, a.high + b.high),
    "sub": lambda a, b: Interval(a.low - b.high, a.high - b.low),
    "mul": _corners(np.multiply),
    "div": _divide,
    "floordiv": _corners(np.floor_divide),
    "mod": _remainder,
    "min": lambda a, b: Interval(np.minimum(a.low, b.low), np.minimum(a.high, b.high)),
    "max": lambda a, b: Interval(np.maximum(a.low, b.low), np.maximum(a.high, b.high)),
    "neg": lambda a: Interval(-a.high, -a.low),
    "abs": _absolute,
    "lt": lambda a, b: Interval.of((a.high < b.low) * 1, (a.low < b.high) * 1),
    "le": lambda a, b: Interval.of((a.high <= b.low) * 1, (a.low <= b.high) * 1),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "and": lambda a, b: Interval(np.minimum(a.low, b.low), np.minimum(a.high, b.high)),
    "or": lambda a, b: Interval(np.maximum(a.low, b.low), np.maximum(a.high, b.high)),
    "not": _not,
    "where": _where,
    "exp": _rising(np.exp, 0.0),
    "log": _rising(np.log, -np.inf),
    "sqrt": _rising(np.sqrt, 0.0),
    "tanh": _rising(np.tanh, -1.0),
    "floor": _floor,
}
