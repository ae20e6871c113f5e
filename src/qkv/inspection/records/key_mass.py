"""The weight that every row puts on some keys, named by their rows or by their distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.errors import ArgumentError
from qkv.inspection.heads.earlier_tokens import sequence_starts
from qkv.inspection.weights.replay import PAIRS, Replay
from qkv.problem.spec import Problem

__all__ = [
    "PLACES", "counted_rows", "has_key_at", "key_rows", "mass_at_offset", "mass_of_head",
    "mass_on_rows",
]  # fmt: skip

Array = NDArray[Any]

_PAIRS_HELD = 16 * PAIRS
"""Weights that are held at once."""

PLACES = {"previous": -1, "own": 0, "next": 1}
"""Keys that statistics of heads name, by their distance."""


def mass_on_rows(replay: Replay, kv_index: Array) -> Array:
    """The weight on some rows of the key array, `(batch, num_heads, q_len)`."""
    return _map_heads(replay, lambda batch, head: mass_of_head(replay, batch, head, kv_index))


def mass_of_head(replay: Replay, batch: int, head: int, kv_index: Array) -> Array:
    """The weight on some rows of the key array in one head, `(q_len,)`."""
    spec = replay.problem.spec
    weights_of = replay.whole_rows if len(kv_index) == spec.kv_len else replay.by_lse
    step = max(1, _PAIRS_HELD // max(len(kv_index), 1))
    parts = np.split(np.arange(spec.q_len), range(step, spec.q_len, step))
    sums = [weights_of(batch, head, rows, kv_index).sum(axis=1, dtype=np.float64) for rows in parts]
    return np.concatenate([np.zeros(0), *sums])


def mass_at_offset(replay: Replay, offset: int) -> Array:
    """The weight on the keys at position `q_pos + offset`, `(batch, num_heads, q_len)`."""
    positions = replay.problem.operands.positions
    q_pos_and_kv_pos = positions.query_positions(), positions.key_positions()

    def head_mass(batch: int, head: int) -> Array:
        q_pos, kv_pos = (p[batch if len(p) > 1 else 0] for p in q_pos_and_kv_pos)
        order = np.argsort(kv_pos, kind="stable")
        ordered = kv_pos[order]
        first = np.searchsorted(ordered, q_pos + offset, "left")
        count = np.searchsorted(ordered, q_pos + offset, "right") - first
        # In packed sequences a position comes once in each, so that there may be many keys.
        step = max(1, _PAIRS_HELD // max(count.max(initial=0), 1))
        masses: list[Array] = [np.zeros(0)]
        for start in range(0, len(q_pos), step):
            times = count[start : start + step]
            rows = start + np.arange(len(times))
            q_index = np.repeat(rows, times)
            nth = np.arange(len(q_index)) - np.repeat(np.cumsum(times) - times, times)
            kv_index = order[np.repeat(first[rows], times) + nth]
            weights = replay.pairs_by_lse(batch, head, q_index, kv_index)
            masses.append(np.bincount(q_index - start, weights, minlength=len(rows)))
        return np.concatenate(masses)

    return _map_heads(replay, head_mass)


def has_key_at(q_pos: Array, kv_pos: Array, offset: int, real: Array | None = None) -> Array:
    """Whether some key is at `q_pos + offset`, `(batch, q_len)`.

    Parameters
    ----------
    q_pos, kv_pos : integer array (1 or batch, q_len), (1 or batch, kv_len)
        Where they are equal and begin anew, keys of other sequences are none.
    offset : int
    real : boolean array (batch, kv_len), optional
        False for a key that is padding.
    """
    if np.array_equal(q_pos, kv_pos):
        sequence = np.cumsum(sequence_starts(kv_pos), axis=1)
        apart = 2 * (abs(kv_pos).max(initial=0) + abs(offset) + 1)
        q_pos = kv_pos = kv_pos + sequence * apart
    rows = np.broadcast_shapes(q_pos.shape[:1], kv_pos.shape[:1])
    queries, keys = (np.broadcast_to(p, (*rows, p.shape[1])) for p in (q_pos, kv_pos))
    has_key = np.zeros(queries.shape, bool)
    for b, (q_row, kv_row) in enumerate(zip(queries, keys, strict=True)):
        has_key[b] = np.isin(q_row + offset, kv_row if real is None else kv_row[real[b]])
    return has_key


def counted_rows(rows: dict[str, Array], best: Array, problem: Problem) -> dict[str, Array]:
    """Statistics (..., num_heads, q_len), NaN where the query has no key of which they tell.

    Parameters
    ----------
    rows : dict of str to array
        Those of `PLACES` need a key at this distance; where "entropy" is NaN, there are no weights.
    best : integer array (..., num_heads, q_len)
        The best key of each query, -1 where there is none.
    problem : Problem
    """
    spec, positions = problem.spec, problem.operands.positions
    # A score of plus infinity leaves a weight of 0 to the other keys, but no weights to its row.
    counted = dict.fromkeys(rows, (best >= 0) & ~np.isnan(rows["entropy"]))
    for name, offset in PLACES.items():
        has_key = has_key_at(positions.query_positions(), positions.key_positions(), offset)
        whole = np.broadcast_to(has_key[:, None], (spec.batch_size, spec.num_heads, spec.q_len))
        counted[name] = counted[name] & whole.reshape(best.shape)
    return {name: np.where(counted[name], of, np.nan) for name, of in rows.items()}


def key_rows(keys: Any, kv_len: int) -> Array:
    """Rows of the key array that an index, an array, a slice or booleans name, each once.

    Raises
    ------
    ArgumentError
        If a key is outside of the key array, or a slice has no numbers or no step.
    """
    if isinstance(keys, slice):
        try:
            return np.arange(kv_len)[keys]
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"keys={shown(keys)} is not a slice of rows: {error}.",
                action="Pass one such as slice(0, 10, 2).",
            ) from error
    try:
        array = np.asarray(keys)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        array = np.array([None])
    if array.dtype == bool and array.shape == (kv_len,):
        return np.flatnonzero(array)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu" or array.min() < -kv_len or array.max() >= kv_len:
        raise ArgumentError(
            f"mass takes rows of the key array, of which there are {kv_len}.",
            [("keys", f"{array.dtype} {array.shape}")],
            f"Pass indices, a slice, or a boolean array of shape ({kv_len},).",
        )
    rows = array.astype(np.int64)  # Types of 8 bits cannot hold every length.
    return np.unique(np.where(rows < 0, rows + kv_len, rows))


def _map_heads(replay: Replay, head_function: Callable[[int, int], Array]) -> Array:
    spec = replay.problem.spec
    out = np.zeros((spec.batch_size, spec.num_heads, spec.q_len), replay.dtype)
    for batch in range(spec.batch_size if spec.q_len and spec.kv_len else 0):
        for head in range(spec.num_heads):
            out[batch, head] = head_function(batch, head)
    return out
