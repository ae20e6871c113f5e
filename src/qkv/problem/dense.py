"""One head of one batch row written out in full, in float64: what `naive` oracles work on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(slots=True)
class Dense:
    """The whole matrices of one (batch row, query head), for oracles that follow a paper.

    A variant changes `scores` (q_len, kv_len), clears entries of `allowed`, multiplies `factors`
    (applied to the weights after the softmax), or sets `sink`. Before the product it may change
    the positions and the rows of `query` and `key`.
    """

    query: Array
    key: Array
    value: Array
    scale: float
    batch: int
    batch_index: tuple[int, ...]
    head: int
    num_heads: int
    q_pos: Array
    kv_pos: Array
    align: str | None = None
    sink: float = -np.inf
    scores: Array = field(init=False)
    allowed: Array = field(init=False)
    factors: Array = field(init=False)

    def __post_init__(self) -> None:
        shape = (len(self.query), len(self.key))
        self.scores = np.zeros(shape)
        self.allowed = np.ones(shape, bool)
        self.factors = np.ones(shape)

    def products(self) -> Array:
        """`scale * query[i] . key[j]` for every pair."""
        scores = np.zeros((len(self.query), len(self.key)))
        for i, row in enumerate(self.query):
            scores[i] = self.scale * np.sum(row * self.key, axis=1)
        return scores

    @property
    def distance(self) -> Array:
        """`q_pos - kv_pos` for every pair."""
        return np.asarray(self.q_pos[:, None] - self.kv_pos[None, :])

    def head_matrix(self, array: Any) -> Array:
        """The matrix of this batch row and head from an array that broadcasts to all scores."""
        full = np.asarray(array)
        lead = (*self.batch_index, self.head)
        matrix = full.reshape((1,) * (len(lead) + 2 - full.ndim) + full.shape)
        picked = matrix[tuple(min(i, n - 1) for i, n in zip(lead, matrix.shape, strict=False))]
        return np.broadcast_to(picked, picked.shape)

    def batch_entry(self, array: Any, trailing: int = 0) -> Array:
        """The entry of this batch row from an array over the leading dimensions."""
        full = np.asarray(array)
        lead = full.ndim - trailing
        index = self.batch_index[len(self.batch_index) - lead :] if lead else ()
        return np.asarray(
            full[tuple(min(i, n - 1) for i, n in zip(index, full.shape, strict=False))]
        )
