"""The weights again, tile by tile: `w = exp(s - lse)`, from query, key and lse alone.

The forward pass leaves one number for each row; with it any tile of the weights can be computed at
any time in O(tile) memory. Masks and mods are those of the output, since both read the same
`Scores`. Source: Dao et al., "FlashAttention" (2022), section 3.1 (recomputation).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.scores import Scores
from qkv.problem.spec import Problem
from qkv.problem.tiles import TileKind

Array = NDArray[Any]
Progress = Callable[[int, int], object]

BLOCK_Q, BLOCK_KV = 512, 1024
PAIRS = 1 << 15
"""Pairs computed at once where single weights are asked for."""

LOG_ZERO = -1e4
"""What log(weight) is raised to: its exp is 0 and, unlike -inf, times 0 it is still 0."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile: its place, its scores, and the logarithm of its weights (at least `LOG_ZERO`)."""

    batch: int
    head: int
    q_rows: slice
    kv_rows: slice
    scores: Array
    log_weights: Array


@dataclass(slots=True)
class Replay:
    """Weights of a problem whose forward pass gave `lse`, `(*batch_shape, num_heads, q_len)`."""

    problem: Problem
    lse: Array
    scores: Scores = field(init=False)
    shift: Array = field(init=False)

    def __post_init__(self) -> None:
        spec = self.problem.spec
        self.scores = Scores(self.problem, spec.compute_dtype)
        flat = self.lse.reshape(spec.batch_size, spec.num_heads, spec.q_len)
        # A row without keys has lse -inf and no finite score: shifting it by 0 keeps it empty.
        self.shift = np.where(np.isneginf(flat), 0, flat).astype(self.dtype)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.scores.dtype

    def tiles(self, progress: Progress | None = None) -> Iterator[Tile]:
        """All tiles that are not empty: batch, head, queries, then keys, in rising order."""
        spec = self.problem.spec
        grid = self.scores.grid(BLOCK_Q, BLOCK_KV)
        total, done = spec.batch_size * spec.num_heads * grid.q_blocks, 0
        for batch in range(spec.batch_size):
            for head in range(spec.num_heads):
                for i, kinds in grid.rows(batch, head):
                    q_rows = slice(i * BLOCK_Q, min((i + 1) * BLOCK_Q, spec.q_len))
                    for run in grid.runs(kinds):
                        for start in range(run.start, run.stop, BLOCK_KV):
                            kv_rows = slice(start, min(start + BLOCK_KV, run.stop))
                            yield self._tile(batch, head, q_rows, kv_rows, run.kind)
                    done += 1
                    if progress is not None:
                        progress(done, total)

    def _tile(self, batch: int, head: int, q_rows: slice, kv_rows: slice, kind: TileKind) -> Tile:
        scores = self.scores.tile(batch, head, q_rows, kv_rows, kind)
        with np.errstate(all="ignore"):
            log_weights = scores - self.shift[batch, head, q_rows, None]
            np.maximum(log_weights, self.dtype.type(LOG_ZERO), out=log_weights)
        return Tile(batch, head, q_rows, kv_rows, scores, log_weights)

    def block(self, batch: int, head: int, q_index: Array, kv_index: Array) -> Array:
        """Weights of some query rows (a column of the result each) on some key rows."""
        query = self.scores.query(batch, head, q_index)
        key = self.scores.key(batch, head, kv_index)
        with np.errstate(all="ignore"):
            raw = (query @ key.T) * self.dtype.type(self.problem.operands.scale)
            s = self.scores.finish(raw, batch, head, q_index[:, None], kv_index[None, :])
            return np.asarray(np.exp(s - self.shift[batch, head, q_index, None]))

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
                out[part] = np.exp(s - self.shift[batch, head, rows])
        return out
