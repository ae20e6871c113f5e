"""The statistics of each head that a summary shows, and the notable heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qkv.inspection.heads.head_table import mean_of_known
from qkv.inspection.records.non_finite import First, NonFinite
from qkv.problem.spec import Problem
from qkv.variants import Causal

Array = NDArray[Any]

FAR = 4
"""Positions between a query and a key from which the key counts as further away."""

_PLACES = ("first", "previous", "own", "next")
_NOTABLE_MASS = 0.5
_NOTABLE_WEIGHT = 0.2
_KEYS_OF_A_ROW = 5
"""Keys of each row that are searched: a row has at most so many weights of `_NOTABLE_WEIGHT`."""


class ReadRecord(Protocol):
    """What a text reads of a `qkv.Record`, which itself makes its text here."""

    @property
    def lse(self) -> Any: ...
    @property
    def problem(self) -> Problem: ...
    @property
    def variants(self) -> tuple[Any, ...]: ...
    @property
    def entropy(self) -> Any: ...
    def non_finite_of(self, first: First | None = None) -> tuple[Array, tuple[str, ...]]: ...
    def rows_by_query(self) -> dict[str, Array]: ...
    def top(self, k: int) -> tuple[Any, Any]: ...


@dataclass(frozen=True, slots=True)
class ShownHeads:
    """What a summary says of heads beside their statistics.

    Attributes
    ----------
    title : str
    tokens : tuple of str, or None
        Names of the keys.
    variants : tuple
    q_len, kv_len, head_dim : int
        Of the whole call.
    rows : int
        How many of its queries are shown.
    q_offset : int
        Position of the first of them.
    batch, batch_size : int
        Which batch row, and of how many.
    head, q_index : int
        Which head and query of the call come first here.
    notes : tuple of str
        What there is to know of the text.
    q_tokens : sequence of str, or None
        Names of all queries, none where they are not known; None if they are among the keys.
    """

    title: str
    tokens: tuple[str, ...] | None
    variants: tuple[Any, ...]
    q_len: int
    kv_len: int
    head_dim: int
    rows: int
    q_offset: int
    batch: int = 0
    batch_size: int = 1
    head: int = 0
    q_index: int = 0
    notes: tuple[str, ...] = ()
    q_tokens: Sequence[str] | None = None

    @property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return any(isinstance(variant, Causal) for variant in self.variants)

    def token_at(self, position: int) -> str | None:
        """The token of a query or key position, if there is one."""
        tokens = self.tokens
        return tokens[position] if tokens and 0 <= position < len(tokens) else None

    def q_token(self, q_index: int) -> str | None:
        """The token of a query row of the given arrays, if there is one."""
        if self.q_tokens is not None:
            return self.q_tokens[q_index] if 0 <= q_index < len(self.q_tokens) else None
        return self.token_at(self.q_offset + q_index - self.q_index)


@dataclass(frozen=True, slots=True)
class HeadStatistics:
    """Statistics of `qkv.inspect` for some heads and rows: arrays `(heads, rows, ...)`."""

    record: ReadRecord
    select: Callable[[Array], Array]
    first: First | None = None

    @property
    def non_finite(self) -> NonFinite:
        """Which rows have no weights, and why."""
        rows, reasons = self.record.non_finite_of(self.first)
        return NonFinite(self.select(rows.reshape(self.record.entropy.shape)), reasons)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why rows have no weights, if some have none."""
        return self.non_finite.reasons

    @property
    def entropy(self) -> Array:
        return self.select(self.record.entropy)

    def rows_by_query(self) -> dict[str, Array]:
        return {name: self.select(rows) for name, rows in self.record.rows_by_query().items()}

    def top(self, count: int) -> tuple[Array, Array]:
        indices, weights = self.record.top(count)
        return self.select(indices), self.select(weights)


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


def heads(shown: ShownHeads, record: HeadStatistics, top: int) -> list[Head]:
    """All heads, `top` pairs of each."""
    kv_len = shown.kv_len
    # `rows_by_query` reads one key of each row, which is then known.
    indices, weights = record.top(min(kv_len, max(top + 1, _KEYS_OF_A_ROW)))
    rows = record.rows_by_query()
    q_index = np.arange(shown.rows)[:, None]
    beyond = indices != 0
    far = beyond & (abs(q_index + shown.q_offset - indices) >= FAR) & (weights >= _NOTABLE_WEIGHT)
    return [
        Head(
            index=shown.head + h,
            entropy=mean_of_known(rows["entropy"][h]),
            mass={name: mean_of_known(rows[name][h]) for name in _PLACES},
            pairs=strongest(indices[h], weights[h], top, shown.q_index),
            pairs_beyond_first=strongest(
                indices[h], np.where(beyond[h], weights[h], 0), top, shown.q_index
            ),
            far_pairs=strongest(indices[h], np.where(far[h], weights[h], 0), 3, shown.q_index),
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


def notable_heads(all_heads: list[Head]) -> list[tuple[str, Head]]:
    """The head with most weight on the next, previous, own and first key each, if over half."""
    best = (
        (name, max(all_heads, key=lambda h: np.nan_to_num(h.mass[name])))
        for name in all_heads[0].mass
    )
    return [(name, head) for name, head in best if head.mass[name] >= _NOTABLE_MASS]


def most_distant_head(all_heads: list[Head]) -> Head | None:
    """The head with the largest total weight on distant pairs, or None."""
    head = max(all_heads, key=lambda h: sum(pair.weight for pair in h.far_pairs))
    return head if head.far_pairs else None
