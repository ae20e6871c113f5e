"""What caches check before anything changes: the numbers that they are given, and the threads."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.readable_checks import as_array
from qkv.arrays import kind_of, library_of
from qkv.errors import ArgumentError, DTypeError, ShapeError

__all__ = [
    "MOST_ROWS", "Lengths", "longest", "require_unchanged", "sequence_indices", "shorter_lengths",
    "whole_numbers",
]  # fmt: skip

Lengths: TypeAlias = NDArray[np.int64]

MOST_ROWS = 2**40
"""The most rows of one sequence, so that products with other sizes remain within int64."""


def longest(lengths: Lengths) -> int:
    """The largest of them, 0 if there are none; one sequence is read without a reduction."""
    if lengths.size == 1:
        return int(lengths.flat[0])
    return int(lengths.max(initial=0))


def require_unchanged(before: Any, now: Any) -> None:
    """Raise ArgumentError if a cache does not hold what it held when a change of it began."""
    if now is not before:
        raise ArgumentError(
            "another thread has changed the cache while this one did.",
            [("lengths before", str(before.lengths)), ("now", str(now.lengths))],
            "Give each thread a fork of its own.",
        )


def viewed(name: str, given: Any) -> NDArray[Any]:
    """An array of any library, or what NumPy makes one of, such as a number; integers if empty."""
    is_array = kind_of(given) is not None and not isinstance(given, np.generic)
    array = library_of(given, name).view(given, name) if is_array else as_array(name, given)
    return array if array.size else array.astype(np.int64)


def whole_numbers(name: str, given: Any, shape: tuple[int, ...]) -> Lengths:
    """An int64 array of this shape from an integer or an integer array that fits it."""
    array = viewed(name, given)
    if array.dtype.kind not in "iu":
        raise DTypeError(
            f"{name} has dtype {array.dtype}, not an integer type.",
            action=f"Pass {name} as integers.",
        )
    if array.shape not in ((), shape):
        raise ShapeError(
            f"{name} has shape {array.shape}; the sequences have {shape}.",
            action="Pass one integer for all, or one for each sequence.",
        )
    return np.broadcast_to(array, shape).astype(np.int64)


def shorter_lengths(given: Any, current: Lengths) -> Lengths:
    """Lengths to truncate to, each from 0 to the current one."""
    lengths = whole_numbers("lengths", given, current.shape)
    wrong = (lengths < 0) | (lengths > current)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ArgumentError(
            f"sequence {where} cannot be truncated to {lengths[where]} tokens; "
            f"it has {current[where]}.",
            action="Pass lengths from 0 to those in `cache.lengths`.",
        )
    return lengths


def sequence_indices(given: Any, batch_shape: tuple[int, ...]) -> Lengths:
    """Numbers of sequences, one-dimensional and each in the batch."""
    indices = viewed("indices", given)
    if indices.dtype.kind not in "iu":
        raise DTypeError(
            f"indices have dtype {indices.dtype}, not an integer type.",
            action="Pass the number of a sequence for each sequence of the new batch.",
        )
    if indices.ndim != 1 or not batch_shape:
        raise ShapeError(
            f"indices have shape {indices.shape}, the sequences {batch_shape}.",
            action="Pass one dimension of indices to a cache with a batch dimension.",
        )
    wrong = (indices < 0) | (indices >= batch_shape[0])
    if wrong.any():
        raise ArgumentError(
            f"there is no sequence {indices[wrong][0]}; the batch has {batch_shape[0]}.",
            action=f"Pass indices from 0 to {batch_shape[0] - 1}.",
        )
    return indices.astype(np.int64)
