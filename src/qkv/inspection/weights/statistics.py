"""Statistics of all rows in one pass over the tiles, in NumPy, for backends that have none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import checked_size
from qkv.backends import Inspectable, Progress
from qkv.inspection.weights.replay import Replay, ScoreTile, weights_of

Array = NDArray[Any]

_MOST_KEYS = 2**20
"""The most keys of each row that `top` returns."""


@dataclass(frozen=True, slots=True)
class WeightStatistics:
    """`entropy` and `max_weight` `(batch, num_heads, q_len)`, `received` `(..., kv_len)`."""

    entropy: Array
    max_weight: Array
    received: Array


def weight_statistics(replay: Replay, progress: Progress | None = None) -> WeightStatistics:
    """Entropy, largest and received weight; sums over tiles are kept in float64."""
    spec = replay.problem.spec
    heads = (spec.batch_size, spec.num_heads)
    entropy = np.zeros((*heads, spec.q_len))
    largest = np.zeros((*heads, spec.q_len), replay.dtype)
    received = np.zeros((*heads, spec.kv_len))
    for tile in replay.tiles(progress):
        rows = (tile.batch, tile.head, tile.q_rows)
        columns = (tile.batch, tile.head, tile.kv_rows)
        log_weights = tile.log_weights()
        with np.errstate(all="ignore"):
            weights = np.exp(log_weights)
            entropy[rows] -= np.einsum("ij,ij->i", weights, log_weights)
            largest[rows] = np.maximum(largest[rows], weights.max(axis=1))
            received[columns] += weights.sum(axis=0)
    return WeightStatistics(
        np.maximum(entropy, 0.0).astype(replay.dtype), largest, received.astype(replay.dtype)
    )


def number_of_keys(k: Any) -> int:
    """How many keys of each row `top` is to return, as an int.

    Raises
    ------
    ArgumentError
        It is not a whole number from 1 to `_MOST_KEYS`.
    """
    return checked_size("k", k, most=_MOST_KEYS)


def top_keys(replay: Replay, k: int, progress: Progress | None = None) -> tuple[Array, Array]:
    """Indices and weights of the k best keys of each row, `(batch, num_heads, q_len, k)`.

    Their scores are kept while the tiles go by.
    """
    spec = replay.problem.spec
    shape = (spec.batch_size, spec.num_heads, spec.q_len, k)
    indices = np.full(shape, -1, np.int64)
    best = np.full(shape, -np.inf, replay.dtype)
    a, b = (np.zeros(shape[:-1], replay.dtype) for _ in range(2))
    for tile in replay.tiles(progress):
        rows = (tile.batch, tile.head, tile.q_rows)
        a[rows], b[rows] = tile.shift
        _merge_tile(tile, indices[rows], best[rows])
    return indices, weights_of(best, a[..., None], b[..., None])


@dataclass(slots=True, eq=False)
class BestKeys:
    """The best keys of each row, kept when they have been looked for.

    Those of a backend and those of NumPy are kept apart. They round scores differently, and what
    is given for k must not depend on what was asked before.
    """

    _by_backend: tuple[Array, Array] | None = None
    _by_numpy: tuple[Array, Array] | None = None

    def at_least(
        self, k: int, replay: Replay, backend: Inspectable | None, progress: Progress | None
    ) -> tuple[Array, Array]:
        """Keys and weights of k keys or more, in order of falling scores."""
        best = self._by_backend
        if backend is not None and _are_fewer(best, k):
            best = backend.top(replay.problem, replay.lse, k, progress)
            self._by_backend = best or self._by_backend
        if best is None:
            best = self._by_numpy
            if best is None or _are_fewer(best, k):
                self._by_numpy = best = top_keys(replay, k, progress)
        return best


def _are_fewer(best: tuple[Array, Array] | None, k: int) -> bool:
    return best is None or best[0].shape[-1] < k


def by_weight(indices: Array, weights: Array) -> tuple[Array, Array]:
    """The same keys in order of their weights, and of equal weights by rising index, in place.

    They come in order of their scores. Scores that differ may have weights that round to one
    number, and then backends that round scores differently would disagree about the order.
    """
    if 0 in indices.shape:
        return indices, weights
    equal = weights[..., :-1] == weights[..., 1:]
    turned = equal & (indices[..., :-1] > indices[..., 1:]) & (indices[..., 1:] >= 0)
    rows = turned.any(axis=-1)
    if rows.any():
        some, theirs = indices[rows], weights[rows]
        padded_last = np.where(some < 0, np.iinfo(np.int64).max, some)
        order = np.lexsort((padded_last, -theirs), axis=-1)
        indices[rows] = np.take_along_axis(some, order, axis=-1)
        weights[rows] = np.take_along_axis(theirs, order, axis=-1)
    return indices, weights


def _merge_tile(tile: ScoreTile, indices: Array, best: Array) -> None:
    """Merge a tile into the best k of its rows, in place.

    Tiles come in rising key order, so a later key must be strictly better to enter: ties stay
    with the lower index.
    """
    scores = tile.scores
    count, k = best.shape
    better = scores > best[:, -1:]
    if k < scores.shape[1] and np.count_nonzero(better) > 4 * k * count:
        # Many scores are better: only those that reach the k-th best of the tile are merged.
        numbers = np.where(np.isnan(scores), -np.inf, scores)
        at_least = np.partition(numbers, scores.shape[1] - k, axis=1)[:, scores.shape[1] - k]
        better &= scores >= at_least[:, None]
    flat_index = np.flatnonzero(better)
    if not len(flat_index):
        return
    rows, columns = np.divmod(flat_index, scores.shape[1])
    changed = np.unique(rows)
    repeated_rows = np.repeat(changed, k)
    row = np.concatenate([repeated_rows, rows])
    score = np.concatenate([best[changed].reshape(-1), scores[rows, columns]])
    index = np.concatenate([indices[changed].reshape(-1), columns + tile.kv_rows.start])
    order = np.lexsort((index, -score, row))
    row, score, index = row[order], score[order], index[order]
    starts = np.searchsorted(row, changed)
    rank = np.arange(len(row)) - np.repeat(starts, np.diff([*starts, len(row)]))
    chosen = rank < k
    best[row[chosen], rank[chosen]] = score[chosen]
    indices[row[chosen], rank[chosen]] = index[chosen]
