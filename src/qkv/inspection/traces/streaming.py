"""The softmax as a stream: the states of the online algorithm after each tile of keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.scores import weighted_sum

__all__ = ["TileState", "stream"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class TileState:
    """The state of some queries after one more tile of keys.

        m' = max(m, max s),   a = exp(m - m')
        l' = a l + sum exp(s - m'),   o' = a o + exp(s - m') v

    Attributes
    ----------
    first, stop : int
        The keys of the tile.
    scores : array (..., stop - first)
        -inf where a mask forbids the pair.
    largest : array (...)
        The largest score of the tile.
    row_max : array (...)
        m': the largest score so far.
    rescale : array (...)
        a: what the earlier sums are multiplied by; 0 for the first tile.
    exp : array (..., stop - first)
        `exp(s - m')`.
    row_sum : array (...)
        l': the sum so far.
    accumulator : array (..., v_head_dim)
        o': the weighted sum of values so far; divided by row_sum it is the output.
    """

    first: int
    stop: int
    scores: Array
    largest: Array
    row_max: Array
    rescale: Array
    exp: Array
    row_sum: Array
    accumulator: Array

    def row(self, i: int) -> TileState:
        """The state of one query."""
        arrays: dict[str, Any] = {f.name: getattr(self, f.name)[i] for f in fields(self)[2:]}
        return TileState(self.first, self.stop, **arrays)


def stream(
    scores: Array,
    value: Array,
    block_kv: int,
    sink: float | None = None,
    factors: Array | None = None,
) -> Iterator[TileState]:
    """The states of the online softmax, tile by tile.

    Parameters
    ----------
    scores : array (rows, kv_len)
        Final scores, -inf where a pair is forbidden.
    value : array (kv_len, v_head_dim)
    block_kv : int
        Keys of a tile.
    sink : float, optional
        A learned sink: the stream begins with the maximum `sink` and the sum 1.
    factors : array (rows, kv_len), optional
        Dropout factors of the weights.

    Yields
    ------
    TileState
        For each tile in which a pair is allowed.

    Notes
    -----
    Sources: Milakov and Gimelshein (2018); Dao et al., "FlashAttention" (2022), algorithm 1.

    Examples
    --------
    >>> *_, last = stream(np.log([[1.0, 3.0, 4.0]]), np.eye(3), 2)
    >>> last.accumulator / last.row_sum[:, None]
    array([[0.125, 0.375, 0.5  ]])
    """
    row_max = np.full(len(scores), -np.inf if sink is None else sink)
    row_sum = np.zeros(len(scores)) if sink is None else np.ones(len(scores))
    accumulator = np.zeros((len(scores), value.shape[1]))
    for first in range(0, len(value), block_kv):
        stop = min(first + block_kv, len(value))
        tile = scores[:, first:stop]
        if np.isneginf(tile).all():
            continue
        with np.errstate(all="ignore"):
            largest = tile.max(axis=1)
            new_max = np.maximum(row_max, largest)
            # A row without any key so far has the maximum -inf, and is shifted by 0.
            shift = np.where(np.isneginf(new_max), 0.0, new_max)
            rescale = np.exp(row_max - shift)
            exp = np.where(np.isneginf(tile), 0.0, np.exp(tile - shift[:, None]))
            row_sum = rescale * row_sum + exp.sum(axis=1)
            kept = exp if factors is None else exp * factors[:, first:stop]
            accumulator = rescale[:, None] * accumulator
            accumulator = accumulator + weighted_sum(kept, tile, value[first:stop])
        row_max = new_max
        yield TileState(first, stop, tile, largest, row_max, rescale, exp, row_sum, accumulator)
