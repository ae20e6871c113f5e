"""Weights recomputed from query and key, tile by tile or where they are asked for.

The forward pass leaves one number for each row, lse; with it any weight is `exp(s - lse)` at any
time. But scores depend in their last bits on who multiplied them: kernels add products in another
order than NumPy, some multiply bfloat16 on tiles, and NumPy's own products depend on their shapes.
For scores near 100 in float32, `exp(s - lse)` shows it as 1e-5. So weights that are shown are
divided by sums of their own scores:

- `whole_rows`, and the tiles of `tiles`, by the sum of the scores that they hold anyway;
- `part` and `pairs` by sums that are made once for each row, over all of its keys.

`by_lse` and `pairs_by_lse` take lse, for sums over few keys of many rows, where one pass over all
keys would be the cost. Where |lse| is so large that its rounding would show (a row whose every key
has a bias of -1e9), maximum and sum are found again.

In these four, products are added in float64 and rounded once, so that each score is one number,
however it is asked for: near 1e9 in float32, a last bit is 64. Masks and mods are those of the
output, since all read the same `Scores`. Source: Dao et al., "FlashAttention" (2022), section 3.1
(recomputation).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Progress
from qkv.partial import LSE_ROUNDING, coarse
from qkv.problem.scores import Scores
from qkv.problem.spec import Problem
from qkv.problem.tiles import TileGrid, TileKind

Array = NDArray[Any]

BLOCK_Q, BLOCK_KV = 512, 1024
HELD = 1 << 22
"""Scores of one block of queries that are held at once, while its sums are made."""
PAIRS = 1 << 15
"""Pairs computed at once where single weights are asked for."""

LOG_ZERO = -1e4
"""The smallest log(weight): its exp is 0, and unlike -inf its product with 0 is 0."""


@dataclass(frozen=True, slots=True)
class RowSums:
    """The largest score m of some rows, sinks included, and `l = sum exp(s - m)` in float64."""

    row_max: Array
    row_sum: Array

    @property
    def shift(self) -> tuple[Array, Array]:
        """a and b with `log w = (s - a) - b`: m, or 0 for a row without keys, and log(l)."""
        a = np.where(np.isneginf(self.row_max), 0, self.row_max).astype(self.row_max.dtype)
        log_sum = np.log(np.where(self.row_sum == 0, 1, self.row_sum))
        return a, log_sum.astype(a.dtype)


@dataclass(frozen=True, slots=True)
class ScoreTile:
    """One tile: its place, its scores, and a and b of its rows with `log w = (s - a) - b`."""

    batch: int
    head: int
    q_rows: slice
    kv_rows: slice
    scores: Array
    shift: tuple[Array, Array]

    def log_weights(self) -> Array:
        """The logarithm of the weights, at least `LOG_ZERO`."""
        a, b = (each[:, None] for each in self.shift)
        lowest = self.scores.dtype.type(LOG_ZERO)
        with np.errstate(all="ignore"):
            log_weights = np.maximum((self.scores - a) - b, lowest)
        if np.isnan(b).any():
            log_weights[np.isneginf(self.scores)] = lowest
        return np.asarray(log_weights)


@dataclass(slots=True, eq=False)
class Replay:
    """Weights of a problem whose forward pass gave `lse`, `(*batch_shape, num_heads, q_len)`."""

    problem: Problem
    lse: Array
    scores: Scores = field(init=False)
    _one_number: Scores = field(init=False)
    _exact_scores: Scores = field(init=False)
    _lse_shift: tuple[Array, Array] | None = field(init=False, default=None)
    _sums: tuple[Array, Array] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.scores = Scores(self.problem, self.problem.spec.compute_dtype)
        self._one_number = Scores(self.problem, self.dtype, np.dtype(np.float64))
        self._exact_scores = Scores(self.problem, np.dtype(np.float64))

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.scores.dtype

    @property
    def _rows(self) -> tuple[int, int, int]:
        spec = self.problem.spec
        return spec.batch_size, spec.num_heads, spec.q_len

    @property
    def lse_shift(self) -> tuple[Array, Array]:
        """`a` and `b`, each `(batch, num_heads, q_len)`, with `log w = (s - a) - b`.

        a is lse and b is 0, but for rows without keys (0, so that they stay empty) and rows of
        large |lse| (their maximum, and the logarithm of their sum).
        """
        if self._lse_shift is None:
            flat = self.lse.reshape(self._rows)
            a = np.where(np.isneginf(flat), 0, flat).astype(self.dtype)
            b = np.zeros_like(a)
            large = coarse(a, LSE_ROUNDING)
            for batch, head in np.argwhere(large.any(axis=-1)):
                rows = np.flatnonzero(large[batch, head])
                for part in np.split(rows, range(BLOCK_Q, len(rows), BLOCK_Q)):
                    sums = self._sums_over_keys(int(batch), int(head), part)
                    a[batch, head, part], b[batch, head, part] = sums.shift
            self._lse_shift = a, b
        return self._lse_shift

    def _sums_over_keys(self, batch: int, head: int, q_index: Array) -> RowSums:
        """Sums of some rows over all keys, in rising order, tile by tile."""
        kv_len = self.problem.spec.kv_len
        starts = range(0, kv_len, BLOCK_KV)
        tiles = (
            self._one_number.tile(
                batch, head, q_index, np.arange(start, min(start + BLOCK_KV, kv_len))
            )
            for start in starts
        )
        return self._sums_of(head, len(q_index), tiles)

    def _sink(self, head: int) -> Any:
        """The sink of a head; -inf without one."""
        sinks = self.problem.operands.sinks
        return self.dtype.type(-np.inf if sinks is None else sinks[head])

    def _sums_of(self, head: int, rows: int, tiles: Iterable[Array]) -> RowSums:
        """Sums of rows whose scores are in some tiles."""
        sink = self._sink(head)
        row_max = np.full(rows, sink, self.dtype)
        row_sum = np.full(rows, 0.0 if np.isneginf(sink) else 1.0)
        for s in tiles:
            with np.errstate(all="ignore"):
                new_max = np.maximum(row_max, s.max(axis=1, initial=-np.inf))
                row_sum = row_sum * np.exp(np.where(row_sum > 0, row_max - new_max, 0))
                row_sum += _exp_above(s, new_max[:, None]).sum(axis=1)
            row_max = new_max
        return RowSums(row_max, row_sum)

    def _sums_of_rows(self, batch: int, head: int, q_index: Array) -> RowSums:
        """The sums of some rows by `_one_number`: made now, or kept since they were first made.

        Tiles that a mask leaves empty are not computed.
        """
        if self._sums is None:
            self._sums = np.zeros(self._rows, self.dtype), np.full(self._rows, -1.0)
        row_max, row_sum = (each[batch, head] for each in self._sums)
        scores = self._one_number
        grid = scores.grid(BLOCK_Q, BLOCK_KV)
        missing = np.unique(q_index[row_sum[q_index] == -1])
        for i in np.unique(missing // BLOCK_Q):
            rows = missing[missing // BLOCK_Q == i]
            kinds = grid.classify(batch, head, int(i), int(i) + 1)[0]
            tiles = (
                scores.tile(batch, head, rows, kv_rows, kind)
                for kv_rows, kind in _tiles_of(grid, kinds)
            )
            sums = self._sums_of(head, len(rows), tiles)
            row_max[rows], row_sum[rows] = sums.row_max, sums.row_sum
        return RowSums(row_max[q_index], row_sum[q_index])

    def tiles(self, progress: Progress | None = None) -> Iterator[ScoreTile]:
        """All tiles that are not empty: batch, head, queries, then keys, in rising order."""
        spec = self.problem.spec
        block_q = min(BLOCK_Q, max(1, HELD // max(spec.kv_len, 1)))
        grid = self.scores.grid(block_q, BLOCK_KV)
        total, done = spec.batch_size * spec.num_heads * grid.q_blocks, 0
        for batch in range(spec.batch_size):
            for head in range(spec.num_heads):
                for i, kinds in grid.query_blocks(batch, head):
                    q_rows = slice(i * block_q, min((i + 1) * block_q, spec.q_len))
                    places = [kv_rows for kv_rows, _ in _tiles_of(grid, kinds)]
                    held = [
                        self.scores.tile(batch, head, q_rows, kv_rows, kind)
                        for kv_rows, kind in _tiles_of(grid, kinds)
                    ]
                    shift = self._sums_of(head, q_rows.stop - q_rows.start, held).shift
                    for kv_rows, s in zip(places, held, strict=True):
                        yield ScoreTile(batch, head, q_rows, kv_rows, s, shift)
                    done += 1
                    if progress is not None:
                        progress(done, total)

    def keys_seen(self, batch: int, head: int, first: int, stop: int) -> Array:
        """The keys of all tiles of queries `first` to `stop` that a mask leaves any pair of."""
        grid = self.scores.grid(BLOCK_Q, BLOCK_KV)
        kinds = grid.classify(batch, head, first // BLOCK_Q, -(-stop // BLOCK_Q))
        seen = np.repeat((kinds != TileKind.EMPTY).any(axis=0), BLOCK_KV)
        return np.flatnonzero(seen[: self.problem.spec.kv_len])

    def whole_rows(
        self, batch: int, head: int, q_index: Array, kv_index: Array, *, exact: bool = False
    ) -> Array:
        """Weights of some query rows on all keys that they see, which are named in any order.

        With `exact` they are computed in float64.
        """
        scores_of = self._exact_scores if exact else self.scores
        scores = scores_of.tile(batch, head, q_index, kv_index)
        sink = self._sink(head).astype(scores_of.dtype)
        row_max = scores.max(axis=1, initial=sink)
        exp = _exp_above(scores, row_max[:, None])
        return _divided(exp, exp.sum(axis=1) + _exp_above(sink, row_max), scores)

    def part(self, batch: int, head: int, q_index: Array, kv_index: Array) -> Array:
        """Weights of some query rows on some key rows."""
        sums = self._sums_of_rows(batch, head, q_index)
        scores = self._one_number.tile(batch, head, q_index, kv_index)
        return _divided(_exp_above(scores, sums.row_max[:, None]), sums.row_sum, scores)

    def pairs(self, batch: int, head: int, q_index: Array, kv_index: Array) -> Array:
        """Weights of single pairs, given by two index arrays of one length."""
        out = np.empty(len(q_index), self.dtype)
        for start in range(0, len(q_index), PAIRS):
            rows, columns = q_index[start : start + PAIRS], kv_index[start : start + PAIRS]
            sums = self._sums_of_rows(batch, head, rows)
            scores = self._one_number.pairs(batch, head, rows, columns)
            exp = _exp_above(scores, sums.row_max)
            out[start : start + PAIRS] = _divided(exp, sums.row_sum, scores)
        return out

    def by_lse(self, batch: int, head: int, q_index: Array, kv_index: Array) -> Array:
        """Weights of some query rows on some key rows, by lse."""
        a, b = (shift[batch, head, q_index, None] for shift in self.lse_shift)
        return weights_of(self._one_number.tile(batch, head, q_index, kv_index), a, b)

    def pairs_by_lse(self, batch: int, head: int, q_index: Array, kv_index: Array) -> Array:
        """Weights of single pairs, given by two index arrays of one length, by lse."""
        out = np.empty(len(q_index), self.dtype)
        for start in range(0, len(q_index), PAIRS):
            rows, columns = q_index[start : start + PAIRS], kv_index[start : start + PAIRS]
            a, b = (shift[batch, head, rows] for shift in self.lse_shift)
            scores = self._one_number.pairs(batch, head, rows, columns)
            out[start : start + PAIRS] = weights_of(scores, a, b)
        return out

    def exact(self, batch: int, head: int, q_index: Array, kv_index: Array) -> Array:
        """Weights of some query rows on some key rows, in float64 from whole rows.

        Holds `len(q_index) * kv_len` numbers.
        """
        keys = np.arange(self.problem.spec.kv_len)
        return self.whole_rows(batch, head, q_index, keys, exact=True)[:, kv_index]


def _tiles_of(grid: TileGrid, kinds: Array) -> Iterator[tuple[slice, TileKind]]:
    """Keys and kind of each tile of one block of queries that is not empty."""
    for run in grid.runs(kinds):
        for start in range(run.start, run.stop, grid.block_kv):
            yield slice(start, min(start + grid.block_kv, run.stop)), run.kind


def _exp_above(scores: Any, row_max: Array) -> Array:
    """`exp(s - m)`; 0 for a row without keys."""
    with np.errstate(all="ignore"):
        exp = scores - np.where(np.isneginf(row_max), 0, row_max).astype(row_max.dtype)
        return np.asarray(np.exp(exp, out=exp))


def _divided(exp: Array, row_sum: Array, scores: Array) -> Array:
    """`exp / l`, in place; a forbidden pair has weight 0 in a row of NaN too.

    `exp` holds all keys of rows, `(rows, keys)`, or one pair of each row, `(rows,)`.
    """
    total = np.where(row_sum == 0, 1, row_sum).astype(exp.dtype)
    exp /= total[:, None] if exp.ndim == 2 else total
    if np.isnan(total).any():
        exp[np.isneginf(scores)] = 0
    return exp


def weights_of(scores: Array, a: Array, b: Array) -> Array:
    """`exp((s - a) - b)`; a forbidden pair has weight 0 in a row of NaN too."""
    with np.errstate(all="ignore"):
        weights = np.exp((scores - a) - b)
    if np.isnan(a).any():
        weights[np.isneginf(scores)] = 0
    return np.asarray(weights)
