"""Interval arithmetic on expressions: bounds of a mask over a whole tile, and of table indices.

All tiles of a grid are bounded at once. The bounds of a variable are arrays that broadcast with
one another: query rows as a column, key rows as a row, batch and head as scalars. Bounds are
conservative: the values lie inside whether they are computed in float32 or in float64, and a
condition is `[1, 1]` or `[0, 0]` only when every pair of the tile agrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ArgumentError, ShapeError
from qkv.problem.language.expressions import Const, Load, Node, Op, Var, text, upwards, walk
from qkv.problem.language.intervals import (
    ROUNDS,
    RULES,
    UNKNOWN,
    Interval,
    constant_interval,
    int_bounds,
    int_to_float,
    narrowed,
    rounded,
    wrapped,
)

Array = NDArray[Any]


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
        If the divisor of an integer division or remainder could be below one.
    """
    (interval,) = bounds([node], variables, tables)
    return interval


def bounds(
    nodes: Sequence[Node], variables: Mapping[str, Interval], tables: Mapping[str, Array]
) -> list[Interval]:
    """`bound` of each of some nodes, of which common parts are bounded once."""
    known: dict[Node, Interval] = {}
    for node in nodes:
        for n in upwards(node, known):
            with np.errstate(all="ignore"):
                known[n] = _bound(n, known, variables, tables)
    return [known[node] for node in nodes]


def _bound(
    n: Node,
    known: Mapping[Node, Interval],
    variables: Mapping[str, Interval],
    tables: Mapping[str, Array],
) -> Interval:
    """Bounds of a node whose children have been bounded."""
    match n:
        case Const(value=value):
            return constant_interval(value)
        case Var(name=name):
            return variables.get(name, UNKNOWN)
        case Load():
            return _table_bounds(n, tables[n.table], [known[i] for i in n.indices])
    args = [known[arg] for arg in n.args]
    if n.name in ("floordiv", "mod") and not (args[1].low >= 1).all():
        raise ArgumentError(
            "the divisor of an integer division may be below 1.",
            [("expression", text(n))],
            "Divide by a positive constant, or np.maximum(divisor, 1).",
        )
    kinds = [arg.kind for arg in n.args]
    if n.kind == "int" and n.name != "floor":
        args = [int_bounds(a) if k == "int" else a for a, k in zip(args, kinds, strict=True)]
    elif n.kind == "float" or "float" in kinds:
        args = [int_to_float(a) if k == "int" else a for a, k in zip(args, kinds, strict=True)]
    exact = RULES[n.name](*args)
    if n.name not in ROUNDS:
        return exact
    return wrapped(exact) if n.kind == "int" else rounded(exact)


def check_table_reads(
    roots: Sequence[Node], variables: Mapping[str, Interval], tables: Mapping[str, Array]
) -> None:
    """Raise as `bound` does, without reading the tables that only give values."""
    loads: list[Load] = []
    asked: list[Node] = []
    for n in walk(*roots):
        match n:
            case Load():
                loads.append(n)
                asked += n.indices
            case Op(name="floordiv" | "mod"):
                asked.append(n)
    known = dict(zip(asked, bounds(asked, variables, tables), strict=True))
    for load in loads:
        _check_indices(load, tables[load.table], [known[i] for i in load.indices])


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
    tile_axes: list[str] = []
    for index in indices:
        axis = len(tile_axes)
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
            tile_axes.append("rows" if rows > 1 else "columns")
            column_axes += rows > 1
            row_axes += columns > 1
    if column_axes > 1 or row_axes > 1:
        # The same tile coordinate indexes two axes; the product of ranges is still an outer bound.
        low, high = _least(low.reshape(-1), 0), _greatest(high.reshape(-1), 0)
        tile_axes = []
    if tile_axes == ["columns"]:
        low, high = low[None, :], high[None, :]
    elif tile_axes == ["rows"]:
        low, high = low[:, None], high[:, None]
    elif tile_axes == ["columns", "rows"]:
        low, high = low.T, high.T
    if low.dtype.kind in "bi":
        return Interval(low.astype(np.int64), high.astype(np.int64))
    wide = table.dtype.kind == "f" and table.dtype.itemsize > 4
    low, high = low.astype(np.float64), high.astype(np.float64)
    nan = np.isnan(low)
    interval = Interval(np.where(nan, -np.inf, low), np.where(nan, np.inf, high), nan)
    return narrowed(interval) if wide else interval


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
        # Tiles of a grid are such blocks, for which a plain reduction is ten times faster.
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
