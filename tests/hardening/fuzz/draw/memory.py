"""Where an array lies, drawn at random: every kind of strides that NumPy has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def spoiled(size: int) -> NDArray[np.uint8]:
    """Bytes that are NaN in every floating type."""
    return np.full(size, 0xFF, np.uint8)


def scattered(
    array: Array, rng: np.random.Generator, draws: bool = False, for_tensors: bool = False
) -> Array:
    """The array somewhere else in memory, its axes in any order, with gaps and going backwards.

    A few axes get stride 0; their entries all become the first one. With `draws`, the first axis
    counts draws, which lie one after the other, each with the same strides. Tensors have no
    negative strides, and lie at multiples of their size.
    """
    first = np.zeros(int(draws), int)
    axes = array.ndim - len(first)
    if rng.random() < 0.3:
        return laid(array, np.arange(array.ndim), np.ones(array.ndim, int))
    steps = rng.choice([1, 1, 1, 1, -1, -1, 2, -2, 3], axes)
    steps[rng.random(axes) < 0.02] = 0
    order = rng.permutation(axes) if rng.random() < 0.4 else np.arange(axes)
    lead = int(rng.integers(1, 8)) if rng.random() < 0.15 else 0
    if for_tensors:
        steps, lead = abs(steps), lead * array.itemsize
    order, steps = np.append(first, order + len(first)), np.append(first + 1, steps)
    return laid(array, order, steps, lead)


def in_strides(array: Array, strides: Sequence[int], of_first: int | None = None) -> Array:
    """The array with these strides, in bytes, along all axes but the first.

    That of the first one is chosen unless it is given, so that entries follow one another.
    """
    reach = [s * max(n - 1, 0) for n, s in zip(array.shape[1:], strides, strict=True)]
    before, span = -sum(r for r in reach if r < 0), sum(map(abs, reach)) + array.itemsize
    along = span if of_first is None else of_first
    end = along * max(len(array) - 1, 0)
    place = np.ndarray(
        array.shape,
        array.dtype,
        spoiled(span + abs(end)).data,
        before + max(-end, 0),
        (along, *strides),
    )
    if array.size:
        place[...] = array
    return place


def laid(array: Array, order: NDArray[np.int64], steps: NDArray[np.int64], lead: int = 0) -> Array:
    """The array with its axes in memory in the given order, slowest first.

    Along an axis of step n, entries lie n times as far from each other as they must. Of the memory,
    `lead` bytes come before the first entry, and none after the last.
    """
    kept = array[tuple(slice(None) if step else slice(1) for step in steps)]
    strides, span = np.zeros(array.ndim, np.int64), 1
    for axis in order[::-1]:
        strides[axis] = steps[axis] * span
        span += abs(strides[axis]) * max(kept.shape[axis] - 1, 0)
    first = sum(max(n - 1, 0) * -s for n, s in zip(kept.shape, strides, strict=True) if s < 0)
    item = array.itemsize
    place = np.ndarray(
        kept.shape,
        array.dtype,
        spoiled(lead + int(span) * item).data,
        lead + int(first) * item,
        tuple(int(stride) * item for stride in strides),
    )
    place[...] = kept
    return np.broadcast_to(place, array.shape)
