"""Weights recomputed tile by tile, `w = exp(s - lse)`, from query, key and lse.

The forward pass leaves one number for each row; with it any tile of the weights can be computed at
any time in O(tile) memory. Where that number is so large that its rounding would show (a row whose
every key has a bias of -1e9), the row's maximum and sum are found again by one more pass. Kernels
add products in another order than NumPy, and multiply bfloat16 on tiles: `exp(s - lse)` shows both,
near scores of 100 as 1e-5. So whole rows are divided by the sum of their own scores. Masks and
mods are those of the output, since both read the same `Scores`. Source: Dao et al.,
"FlashAttention" (2022), section 3.1 (recomputation).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Progress
from qkv.inspection.steps import softmax
from qkv.partial import LSE_ROUNDING, coarse
from qkv.problem.scores import Scores
from qkv.problem.spec import Problem

Array = NDArray[Any]

BLOCK_Q, BLOCK_KV = 512, 1024
PAIRS = 1 << 15
"""Pairs computed at once where single weights are asked for."""

LOG_ZERO = -1e4
"""The smallest log(weight): its exp is 0, and unlike -inf its product with 0 is 0."""


@dataclass(frozen=True, slots=True)
class ScoreTile:
    """One tile: its place, and its scores."""

    batch: int
    head: int
    q_rows: slice
    kv_rows: slice
    scores: Array


@dataclass(slots=True)
class Replay:
    """Weights of a problem whose forward pass gave `lse`, `(*batch_shape, num_heads, q_len)`."""

    problem: Problem
    lse: Array
    scores: Scores = field(init=False)
    _shift: tuple[Array, Array] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.scores = Scores(self.problem, self.problem.spec.compute_dtype)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.scores.dtype

    @property
    def shift(self) -> tuple[Array, Array]:
        """`a` and `b`, each `(batch, num_heads, q_len)`, with `log w = (s - a) - b`.

        a is lse and b is 0, but for rows without keys (0, so that they stay empty) and rows of
        large |lse| (their maximum, and the logarithm of their sum).
        """
        if self._shift is None:
            spec = self.problem.spec
            flat = self.lse.reshape(spec.batch_size, spec.num_heads, spec.q_len)
            a = np.where(np.isneginf(flat), 0, flat).astype(self.dtype)
            b = np.zeros_like(a)
            large = coarse(a, LSE_ROUNDING)
            for batch, head in np.argwhere(large.any(axis=-1)):
                rows = np.flatnonzero(large[batch, head])
                for part in np.split(rows, range(BLOCK_Q, len(rows), BLOCK_Q)):
                    index = (batch, head, part)
                    a[index], b[index] = self._row_sums(int(batch), int(head), part)
            self._shift = a, b
        return self._shift

    def _row_sums(self, batch: int, head: int, q_index: Array) -> tuple[Array, Array]:
        """Maximum of each row, the sink included, and the logarithm of its sum over that."""
        kv_len = self.problem.spec.kv_len
        starts = range(0, kv_len, BLOCK_KV)
        indices = (np.arange(start, min(start + BLOCK_KV, kv_len)) for start in starts)
        tiles = (self.scores.tile(batch, head, q_index, kv_index) for kv_index in indices)
        return self._sums_of(head, len(q_index), tiles)

    def _sums_of(self, head: int, rows: int, tiles: Iterable[Array]) -> tuple[Array, Array]:
        """The same of rows whose scores are in some tiles."""
        sinks = self.problem.operands.sinks
        sink = self.dtype.type(-np.inf if sinks is None else sinks[head])
        row_max = np.full(rows, sink, self.dtype)
        row_sum = np.full(rows, 0.0 if sinks is None else 1.0, self.dtype)
        for s in tiles:
            with np.errstate(all="ignore"):
                new_max = np.maximum(row_max, s.max(axis=1, initial=-np.inf))
                row_sum = row_sum * np.exp(np.where(row_sum > 0, row_max - new_max, 0))
                row_sum += np.exp(s - np.where(np.isneginf(new_max), 0, new_max)[:, None]).sum(1)
            row_max = new_max
        with np.errstate(divide="ignore"):
            return row_max, np.log(row_sum)

    def tiles(self, progress: Progress | None = None) -> Iterator[ScoreTile]:
        """All tiles that are not empty: batch, head, queries, then keys, in rising order."""
        spec = self.problem.spec
        grid = self.scores.grid(BLOCK_Q, BLOCK_KV)
        total, done = spec.batch_size * spec.num_heads * grid.q_blocks, 0
        for batch in range(spec.batch_size):
            for head in range(spec.num_heads):
                for i, kinds in grid.query_blocks(batch, head):
                    q_rows = slice(i * BLOCK_Q, min((i + 1) * BLOCK_Q, spec.q_len))
                    for run in grid.runs(kinds):
                        for start in range(run.start, run.stop, BLOCK_KV):
                            kv_rows = slice(start, min(start + BLOCK_KV, run.stop))
                            s = self.scores.tile(batch, head, q_rows, kv_rows, run.kind)
                            yield ScoreTile(batch, head, q_rows, kv_rows, s)
                    done += 1
                    if progress is not None:
                        progress(done, total)

    def log_weights(self, tile: ScoreTile) -> Array:
        """The logarithm of a tile's weights, at least `LOG_ZERO`."""
        a, b = (shift[tile.batch, tile.head, tile.q_rows, None] for shift in self.shift)
        lowest = self.dtype.type(LOG_ZERO)
        with np.errstate(all="ignore"):
            log_weights = tile.scores - a
            if b.any():
                log_weights -= b
            np.maximum(log_weights, lowest, out=log_weights)
        if np.isnan(a).any():
            log_weights[np.isneginf(tile.scores)] = lowest
        return log_weights

    def block(self, batch: int, head: int, q_index: Array, kv_index: Array) -> Array:
        """Weights of some query rows on some key rows.

        Rows on all keys are divided by sums of the scores that are computed here, and add up to 1.
        """
        a, b = (shift[batch, head, q_index] for shift in self.shift)
        scores = self.scores.tile(batch, head, q_index, kv_index)
        if len(np.unique(kv_index)) == self.problem.spec.kv_len == len(kv_index):
            row_max, log_sum = self._sums_of(head, len(scores), [scores])
            finite = np.isfinite(row_max)
            a, b = np.where(finite, row_max, a), np.where(finite, log_sum, b)
        return weights_of(scores, a[:, None], b[:, None])

    def exact(self, batch: int, head: int, q_index: Array, kv_index: Array) -> Array:
        """The same as `block` in float64, from whole rows and without their lse.

        lse is rounded, and exp shows it: near 100 a float32 is off by 4e-6, and so is each weight.
        Holds `len(q_index) * kv_len` numbers.
        """
        sinks = self.problem.operands.sinks
        sink = None if sinks is None else float(sinks[head])
        scores = Scores(self.problem, np.dtype(np.float64))
        keys = np.arange(self.problem.spec.kv_len)
        return softmax(scores.tile(batch, head, q_index, keys), sink).weights[:, kv_index]

    def pairs(self, batch: int, head: int, q_index: Array, kv_index: Array) -> Array:
        """Weights of single pairs, given by two index arrays of one length."""
        out = np.empty(len(q_index), self.dtype)
        for start in range(0, len(q_index), PAIRS):
            part = slice(start, start + PAIRS)
            rows, columns = q_index[part], kv_index[part]
            query = self.scores.query(batch, head, rows)
            key = self.scores.key(batch, head, columns)
            with np.errstate(all="ignore"):
                raw = np.einsum("nd,nd->n", query, key)
                raw = raw * self.dtype.type(self.problem.operands.scale)
                s = self.scores.finish(raw, batch, head, rows, columns)
            a, b = (shift[batch, head, rows] for shift in self.shift)
            out[part] = weights_of(s, a, b)
        return out


def weights_of(scores: Array, a: Array, b: Array) -> Array:
    """`exp((s - a) - b)`; a forbidden pair has weight 0 in a row of NaN too."""
    with np.errstate(all="ignore"):
        weights = np.exp((scores - a) - b)
    if np.isnan(a).any():
        weights[np.isneginf(scores)] = 0
    return np.asarray(weights)
