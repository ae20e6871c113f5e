"""Sums and extremes of lazy weights, tile by tile: no more is held than a tile and the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import checked_integer, shown
from qkv.errors import ArgumentError
from qkv.inspection.weights.replay import Replay

__all__ = ["Axis", "Tiled", "largest", "place_of_largest", "reduced_axes", "smallest", "total"]

Array = NDArray[Any]
TILE = 1 << 19
"""Weights of one tile: as many rows as fit, but one at least."""
Axis: TypeAlias = int | tuple[int, ...] | None


class Tiled(Protocol):
    """Weights that are read tile by tile; see `LazyWeights`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ndim(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def replay(self) -> Replay: ...

    def matrix(self, leading: tuple[int, ...]) -> tuple[int, int]:
        """Flat batch index and head of leading coordinates."""
        ...

    def check_size(self, count: int) -> None:
        """Refuse to hold so many weights at once."""
        ...


def reduced_axes(axis: Axis, ndim: int) -> set[int]:
    """The axes that a reduction names, counted from the front.

    Raises
    ------
    ArgumentError
        An axis is not an integer, or is named twice.
    numpy.exceptions.AxisError
        As NumPy does, for an axis that is not there.
    """
    if axis is None:
        return set(range(ndim))
    given = [checked_integer("axis", n) for n in (axis if isinstance(axis, tuple) else (axis,))]
    for n in given:
        if not -ndim <= n < ndim:
            raise np.exceptions.AxisError(n, ndim)
    axes = {n % ndim for n in given}
    if len(axes) < len(given):
        raise ArgumentError(
            f"axis={shown(axis)} names an axis twice.", action="Name each axis once."
        )
    return axes


def total(weights: Tiled, axes: set[int]) -> Array:
    """The sum over some axes, in float64."""
    return _folded(weights, axes, np.add, np.zeros(_kept(weights, axes)))


def largest(weights: Tiled, axes: set[int]) -> Array:
    """The largest weight over some axes; NaN where one of them is.

    Raises
    ------
    ArgumentError
        There are no weights along the axes.
    """
    _require_some("max", weights, axes)
    return _folded(weights, axes, np.maximum, np.zeros(_kept(weights, axes), weights.dtype))


def smallest(weights: Tiled, axes: set[int]) -> Array:
    """The smallest weight over some axes; NaN where one of them is.

    Raises
    ------
    ArgumentError
        There are no weights along the axes.
    """
    _require_some("min", weights, axes)
    out = np.full(_kept(weights, axes), np.inf, weights.dtype)
    return _folded(weights, axes, np.minimum, out)


def _require_some(name: str, weights: Tiled, axes: set[int]) -> None:
    """Refuse an extreme where there are no weights along the axes, as NumPy does."""
    if any(not weights.shape[n] for n in axes):
        raise ArgumentError(
            f"{name} of no weights has no value.",
            [("weights", str(weights.shape)), ("axis", str(tuple(sorted(axes))))],
            "Leave it out where there are no queries or no keys.",
        )


def place_of_largest(weights: Tiled, axis: int | None) -> Array:
    """The index of the first largest weight along an axis; NaN counts as the largest.

    Raises
    ------
    ArgumentError
        There are no weights along the axis.
    """
    axes = reduced_axes(axis, weights.ndim)
    _require_some("argmax", weights, axes)
    if axis is None:
        best, last = _best_along(weights, weights.ndim - 1)
        row = int(np.argmax(best))
        return np.asarray(row * weights.shape[-1] + int(last.reshape(-1)[row]))
    return _best_along(weights, *axes)[1]


def _best_along(weights: Tiled, axis: int) -> tuple[Array, Array]:
    """The largest weight along an axis, and its index."""
    shape = _kept(weights, {axis})
    best, index = np.full(shape, -1, weights.dtype), np.zeros(shape, np.int64)
    inner = axis - (weights.ndim - 2)
    for leading, first, tile in _tiles(weights):
        local: Array | int
        if inner >= 0:
            local = np.argmax(tile, axis=inner)
            value = np.take_along_axis(tile, np.expand_dims(local, inner), inner).squeeze(inner)
            local = local + first[inner]
        else:
            value, local = tile, leading[axis]
        place = _place(leading, first, tile, {axis})
        better = (value > best[place]) | (np.isnan(value) & ~np.isnan(best[place]))
        best[place] = np.where(better, value, best[place])
        index[place] = np.where(better, local, index[place])
    return best, index


def _kept(weights: Tiled, axes: set[int]) -> tuple[int, ...]:
    """The shape of a result, which must stay below the reference limit."""
    shape = tuple([size for n, size in enumerate(weights.shape) if n not in axes])
    weights.check_size(int(np.prod(shape, dtype=object)))
    return shape


def _folded(weights: Tiled, axes: set[int], fold: np.ufunc, out: Array) -> Array:
    """Tiles joined over some axes by a ufunc, into `out`, which holds where it begins."""
    within = tuple([n for n in (0, 1) if n + weights.ndim - 2 in axes])
    reduce: Callable[..., Array] = fold.reduce
    for leading, first, tile in _tiles(weights):
        place = _place(leading, first, tile, axes)
        part = reduce(tile, axis=within, dtype=out.dtype) if within else tile
        out[place] = fold(out[place], part)
    return out


def _tiles(weights: Tiled) -> Iterator[tuple[tuple[int, ...], tuple[int, int], Array]]:
    """Leading coordinates, first query and key, and the weights of each tile, in rising order.

    Tiles are whole rows, which are divided by the sums of the scores that they hold.
    """
    q_len, kv_len = weights.shape[-2:]
    step, keys = max(1, TILE // max(kv_len, 1)), np.arange(kv_len)
    for leading in np.ndindex(*weights.shape[:-2]):
        batch, head = weights.matrix(leading)
        for first in range(0, q_len if kv_len else 0, step):
            rows = np.arange(first, min(first + step, q_len))
            yield leading, (first, 0), weights.replay.whole_rows(batch, head, rows, keys)


def _place(
    leading: tuple[int, ...],
    first: tuple[int, int],
    tile: Array,
    axes: set[int],
) -> tuple[Any, ...]:
    """Where the part of a tile stands in a result without some axes."""
    inner = [slice(begin, begin + size) for begin, size in zip(first, tile.shape, strict=True)]
    return tuple([entry for n, entry in enumerate((*leading, *inner)) if n not in axes])
