"""Weights of one head reduced over blocks of pairs, in NumPy; for maps and pictures of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Progress
from qkv.inspection.weights.replay import Replay

__all__ = ["folded", "pairs_of", "reduced"]

Array = NDArray[Any]

PAIRS = 1 << 21
"""Weights that are computed at once."""


def reduced(
    replay: Replay,
    head: int,
    q_rows: tuple[int, int],
    kv_rows: tuple[int, int],
    block: int,
    batch: int = 0,
    progress: Progress | None = None,
) -> tuple[Array, Array]:
    """Largest and mean weight of blocks of `block` x `block` pairs of a rectangle.

    Parameters
    ----------
    replay : Replay
    head : int
    q_rows, kv_rows : (first, stop)
        The rectangle; it begins at multiples of `block`.
    block : int
        Blocks at the end may be smaller.
    batch : int
        Flat batch index.
    progress : callable (done, total), optional
        Told of rectangles done, of at most `PAIRS` pairs each.

    Returns
    -------
    (array, array)
        float32 `(blocks of queries, blocks of keys)`.
    """
    (q_first, q_stop), (kv_first, kv_stop) = q_rows, kv_rows
    shape = -(-(q_stop - q_first) // block), -(-(kv_stop - kv_first) // block)
    largest, total = np.zeros(shape, np.float32), np.zeros(shape)
    kv_index = np.arange(kv_first, kv_stop)
    q_step = max(block, PAIRS // max(len(kv_index), 1) // block * block)
    kv_step = max(block, PAIRS // min(q_step, 1 << 12) // block * block)
    q_starts, kv_starts = range(q_first, q_stop, q_step), range(0, len(kv_index), kv_step)
    done = 0
    for q_start in q_starts:
        rows = np.arange(q_start, min(q_start + q_step, q_stop))
        for kv_start in kv_starts:
            columns = kv_index[kv_start : kv_start + kv_step]
            weights = np.nan_to_num(replay.by_lse(batch, head, rows, columns))
            i, j = (q_start - q_first) // block, kv_start // block
            part = largest_of(weights, block)
            place = slice(i, i + part.shape[0]), slice(j, j + part.shape[1])
            largest[place], total[place] = part, sums_of(weights, block)
            done += 1
            if progress is not None:
                progress(done, len(q_starts) * len(kv_starts))
    pairs = pairs_of(q_stop - q_first, kv_stop - kv_first, block)
    return largest, (total / pairs).astype(np.float32)


def pairs_of(q_len: int, kv_len: int, block: int) -> Array:
    """How many pairs each block has, as float64."""
    rows, columns = (
        np.diff(np.append(np.arange(0, length, block), length)) for length in (q_len, kv_len)
    )
    return np.asarray(rows[:, None] * columns, np.float64)


def largest_of(array: Array, block: int) -> Array:
    return np.asarray(folded(array, block, np.maximum), np.float32)


def sums_of(array: Array, block: int) -> Array:
    return folded(array, block, np.add)


def folded(array: Array, block: int, reduce: np.ufunc) -> Array:
    """Blocks of `block` x `block` entries joined by a ufunc such as `np.maximum`."""
    if block == 1:
        return array
    down = reduce.reduceat(array, np.arange(0, array.shape[0], block), axis=0)
    return np.asarray(reduce.reduceat(down, np.arange(0, array.shape[1], block), axis=1))
