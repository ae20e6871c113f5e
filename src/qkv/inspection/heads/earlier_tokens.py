"""Masks for duplicate and induction scores: earlier keys with the query's token, or after one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.masks.same_group import SameGroup

__all__ = ["NO_TOKEN", "EarlierToken", "Tokens", "of_queries", "sequence_starts"]

Array = NDArray[Any]

NO_TOKEN = -1
"""Number of a key that holds no token, or none that may be matched. No query has it."""

_NO_QUERY = -2


@dataclass(frozen=True, eq=False, repr=False)
class EarlierToken(SameGroup):
    """Allowed where `q_ids[i] == kv_ids[j]` and the key is `at_least` positions behind.

    Parameters
    ----------
    q_ids : integer array (batch, q_len)
    kv_ids : integer array (batch, kv_len)
    at_least : int
        Of `q_pos - kv_pos`.
    """

    q_ids: Array
    kv_ids: Array
    at_least: int

    def lower(self, builder: Builder) -> None:
        super().lower(builder)
        builder.mask(builder.kv_pos <= builder.q_pos - builder.scalar(self.at_least, "at_least"))

    def naive(self, dense: Dense) -> None:
        super().naive(dense)
        dense.allowed &= dense.kv_pos <= dense.q_pos[:, None] - self.at_least

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[EarlierToken]:
        (same,) = SameGroup.examples(shape, rng)
        q_ids, kv_ids = np.asarray(same.q_ids), np.asarray(same.kv_ids)
        return (cls(q_ids, kv_ids, 1), cls(q_ids, kv_ids, 0))


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Tokens of the rows of one layer, numbered so that equal ones of one sequence are equal.

    Attributes
    ----------
    q_tokens : integer array (batch, q_len)
    kv_tokens : integer array (batch, kv_len)
    previous_tokens : integer array (batch, kv_len)
        The token at the position before each key, in its own sequence; none before padding, which
        follows nothing.
    q_pos, kv_pos : integer array (batch, q_len), (batch, kv_len)
    """

    q_tokens: Array
    kv_tokens: Array
    previous_tokens: Array
    q_pos: Array
    kv_pos: Array

    @classmethod
    def of(cls, ids: Array, real: Array, first: Array, q_pos: Array, kv_pos: Array) -> Tokens:
        """The tokens with these ids (batch, kv_len); query row 0 is key row `first` (batch,).

        A negative id is not a token, as of an unknown one: nobody knows whether two are the same.
        Packed sequences lie one after another: positions that do not rise begin a new one.
        """
        _, numbers = np.unique(ids, return_inverse=True)
        numbers = numbers.reshape(ids.shape)
        sequence = np.cumsum(sequence_starts(kv_pos), axis=1)
        numbers = numbers + sequence * (numbers.max(initial=0) + 1)
        known = real & (ids >= 0)
        kv_tokens = np.where(known, numbers, NO_TOKEN)
        previous = np.full_like(kv_tokens, NO_TOKEN)
        previous[:, 1:] = np.where(
            sequence_starts(kv_pos)[:, 1:] | ~real[:, 1:], NO_TOKEN, kv_tokens[:, :-1]
        )
        q_tokens = of_queries(np.where(known, numbers, _NO_QUERY), first, q_pos.shape[1], _NO_QUERY)
        return cls(q_tokens, kv_tokens, previous, q_pos, kv_pos)

    @property
    def duplicates(self) -> EarlierToken:
        """Earlier positions that hold the query's token."""
        return EarlierToken(self.q_tokens, self.kv_tokens, 1)

    @property
    def followers(self) -> EarlierToken:
        """Positions right after such positions."""
        return EarlierToken(self.q_tokens, self.previous_tokens, 0)

    def queries_with(self, keys: EarlierToken) -> Array:
        """Whether each query has at least one such key, `(batch, q_len)`."""
        has_key = np.zeros(keys.q_ids.shape, bool)
        rows = (keys.q_ids, keys.kv_ids, self.q_pos, self.kv_pos)
        for b, (q_ids, kv_ids, q_pos, kv_pos) in enumerate(zip(*rows, strict=True)):
            order = np.lexsort((kv_pos, kv_ids))
            ids, nearest = np.unique(kv_ids[order], return_index=True)
            earliest = kv_pos[order][nearest]
            position = np.minimum(np.searchsorted(ids, q_ids), len(ids) - 1)
            behind = q_pos - earliest[position] >= keys.at_least
            has_key[b] = (ids[position] == q_ids) & behind
        return has_key


def of_queries(of_keys: Array, first: Array, q_len: int, without_key: Any) -> Array:
    """The entries (batch, q_len) of keys (batch, kv_len) from key row `first` (batch,) on.

    `without_key` stands for queries behind the last key.
    """
    padded = np.pad(of_keys, ((0, 0), (0, 1)), constant_values=without_key)
    rows = np.minimum(first[:, None] + np.arange(q_len), of_keys.shape[1])
    return np.take_along_axis(padded, rows, axis=1)


def sequence_starts(kv_pos: Array) -> Array:
    """Whether each row (batch, kv_len) begins a sequence: its position does not exceed the last."""
    first = np.ones(kv_pos.shape, bool)
    first[:, 1:] = kv_pos[:, 1:] <= kv_pos[:, :-1]
    return first
