"""The statistics of each head that `qkv inspect` shows, and the notable heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.cli.inputs import CommandInput, HeadStatistics

Array = NDArray[Any]

FAR = 4
"""Positions between a query and a key from which the key counts as further away."""

_NOTABLE_MASS = 0.5
_NOTABLE_WEIGHT = 0.2
_KEYS_OF_A_ROW = 5
"""Keys of each row that are searched: a row has at most so many weights of `_NOTABLE_WEIGHT`."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One weight: a query row looks at a key row."""

    q_index: int
    kv_index: int
    weight: float


@dataclass(frozen=True, slots=True)
class Head:
    """One head, averaged over its query rows; `mass` is where its weight goes."""

    index: int
    entropy: float
    mass: dict[str, float]
    pairs: tuple[Pair, ...]
    pairs_beyond_first: tuple[Pair, ...]
    far_pairs: tuple[Pair, ...]


def heads(problem: CommandInput, record: HeadStatistics, top: int) -> list[Head]:
    """All heads of a problem, `top` pairs of each."""
    kv_len = problem.key.shape[1]
    masses = {
        "first": record.mass([0]),
        "previous": record.mass_at(-1),
        "own": record.mass_at(0),
        "next": record.mass_at(1),
    }
    indices, weights = record.top(min(kv_len, max(top + 1, _KEYS_OF_A_ROW)))
    entropy = record.entropy
    q_index = np.arange(problem.query.shape[1])[:, None]
    beyond = indices != 0
    far = beyond & (abs(q_index + problem.q_offset - indices) >= FAR) & (weights >= _NOTABLE_WEIGHT)
    return [
        Head(
            index=problem.head + h,
            entropy=_mean(entropy[h]),
            mass={name: _mean(mass[h]) for name, mass in masses.items()},
            pairs=strongest(indices[h], weights[h], top, problem.q_index),
            pairs_beyond_first=strongest(
                indices[h], np.where(beyond[h], weights[h], 0), top, problem.q_index
            ),
            far_pairs=strongest(indices[h], np.where(far[h], weights[h], 0), 3, problem.q_index),
        )
        for h in range(len(indices))
    ]


def strongest(indices: Array, weights: Array, count: int, first_row: int = 0) -> tuple[Pair, ...]:
    """The heaviest of the keys of some rows, `(rows, k)`; equal ones in order of rows and keys."""
    k = indices.shape[1]
    flat = weights.ravel()
    order = np.argsort(-flat, kind="stable")[:count]
    return tuple(
        Pair(first_row + int(i) // k, int(indices.ravel()[i]), float(flat[i]))
        for i in order
        if flat[i] > 0
    )


def _mean(rows: Array) -> float:
    """The mean over the rows that have one; NaN if none has."""
    there = rows[~np.isnan(rows)]
    return float(np.mean(there, dtype=np.float64)) if len(there) else float("nan")


def notable_heads(found: list[Head]) -> list[tuple[str, Head]]:
    """For next, previous, own and first key, the head with most weight on it, if over half."""
    best = ((name, max(found, key=lambda h: np.nan_to_num(h.mass[name]))) for name in found[0].mass)
    return [(name, head) for name, head in best if head.mass[name] >= _NOTABLE_MASS]


def most_distant_head(found: list[Head]) -> Head | None:
    """The head with the largest total weight on distant pairs, or None."""
    head = max(found, key=lambda h: sum(pair.weight for pair in h.far_pairs))
    return head if head.far_pairs else None
