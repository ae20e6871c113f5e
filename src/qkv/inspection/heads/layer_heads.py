"""One layer as a problem of attention whose values are positions; scores are made of its passes.

How a pass is run, in this process or over several, a subclass says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.readable_checks import as_array
from qkv.arrays import is_array
from qkv.arrays.views import view
from qkv.errors import DTypeError, ShapeError
from qkv.inspection.heads.earlier_tokens import Tokens, of_queries, sequence_starts
from qkv.inspection.heads.kept_inputs import KeptInputs
from qkv.inspection.heads.score_rows import SCORES, HeadScores
from qkv.inspection.records.key_mass import has_key_at
from qkv.inspection.weights.lazy_weights import LazyWeights
from qkv.partial import Partial, coarse
from qkv.problem.backward import shares_of_sinks
from qkv.variants.dropout import Dropout
from qkv.variants.masks.causal import Causal

__all__ = ["LayerHeads", "checked_real", "needs_float64", "without_dropout"]

Array = NDArray[Any]


def needs_float64(lse: Array) -> bool:
    """Whether rounding of float32 would change scores by a relative error of more than 1e-4."""
    return bool(coarse(lse, 1e-4).any())


class LayerHeads(ABC):
    """A layer whose heads are scored.

    Values of the passes are `(p[j] - origin, 1)` for the position p[j] of each key.

    Attributes
    ----------
    variants : tuple
        Without dropout.
    q_pos, kv_pos : integer array (batch, length)
        Positions of all queries and keys.
    real : boolean array (batch, kv_len)
        False where a key is padding.
    real_queries : boolean array (batch, q_len)
        False where a query is padding.
    lse, entropy, max_weight : array (batch, num_heads, own queries)
    out : array (batch, num_heads, own queries, 2)
        `sum_j w[i, j] (p[j] - origin)`, and `sum_j w[i, j]` without sinks.
    sinks : array (num_heads,) or None
    """

    variants: tuple[Any, ...]
    q_pos: Array
    kv_pos: Array
    real: Array
    real_queries: Array
    lse: Array
    out: Array
    entropy: Array
    max_weight: Array
    sinks: Array | None

    @abstractmethod
    def masked(self, keys: Any) -> Partial:
        """The pass in which a mask allows only some keys."""

    @abstractmethod
    def mass_at(self, offset: int) -> Array:
        """Weight on the keys `offset` positions away, `(batch, num_heads, own queries)`."""

    @abstractmethod
    def mass_of(self, keys: Array) -> Array:
        """Weight on some keys `(batch, kv_len)`, `(batch, num_heads, own queries)`."""

    @abstractmethod
    def received(self) -> Array:
        """Weight that each key takes, `(batch, num_heads, own keys)`."""

    @abstractmethod
    def top(self, k: int) -> tuple[Array, Array]:
        """The best keys of each query, `(batch, num_heads, own queries, k)`, and their weights."""

    def own(self, rows: Array) -> Array:
        """The entries (batch, own queries) of (batch, q_len)."""
        return rows

    def weights(self) -> LazyWeights | None:
        """The weights of the layer, if they can be read."""
        return None

    def inputs(self) -> KeptInputs | None:
        """What the weights come from, if it can be kept."""
        return None

    @property
    def origin(self) -> Array:
        """The position `(batch, 1)` of query row 0; sums of distances from 0 would round more."""
        return np.asarray(self.q_pos[:, :1].sum(axis=1, keepdims=True))

    @property
    def first(self) -> Array:
        """The key row at the position of query row 0 in each batch row; kv_len if there is none."""
        batch, kv_len = self.kv_pos.shape
        if not (self.q_pos.size and self.kv_pos.size):
            return np.full(batch, kv_len)
        is_there = self.kv_pos == self.q_pos[:, :1]
        return np.asarray(np.where(is_there.any(axis=1), is_there.argmax(axis=1), kv_len))

    def scores(self, tokens: Any, top: int, one_sequence: bool) -> HeadScores:
        """All scores; `tokens` (batch, kv_len) or None are those of the keys."""
        lse = self.lse
        none = np.full(lse.shape, np.nan, lse.dtype)
        rows = dict.fromkeys(SCORES, none)
        with np.errstate(divide="ignore", invalid="ignore"):
            rows["max_logit"] = lse + np.log(self.max_weight)
        rows["entropy"] = self.entropy
        rows["learned_sink"] = self._learned_sink()
        rows["sink"] = self.mass_of(self._first_keys()) + rows["learned_sink"]
        having: dict[str, Array] = {}
        if one_sequence:
            rows["previous"], rows["own"] = self.mass_at(-1), self.mass_at(0)
            rows["distance"] = self._distance()
            for name, offset in (("previous", -1), ("own", 0)):
                having[name] = has_key_at(self.q_pos, self.kv_pos, offset, self.real)
        ids = None if tokens is None else _per_row("tokens", tokens, self.kv_pos.shape, "key")
        if one_sequence and ids is not None and (self.first < self.kv_pos.shape[1]).any():
            table = Tokens.of(ids, self.real, self.first, self.q_pos, self.kv_pos)
            for name, keys in (("duplicate", table.duplicates), ("induction", table.followers)):
                rows[name] = self.mass(keys)
                having[name] = table.queries_with(keys)
        indices, largest = self.top(top)
        real = self.own(self.real_queries)
        # A query that no head may use a key of has no weights to count.
        counted = real & ((indices[..., 0] >= 0) | np.isnan(lse)).any(axis=1)
        return HeadScores(
            {name: np.where(real[:, None], row, none) for name, row in rows.items()},
            {name: counted & self.own(having.get(name, self.real_queries)) for name in SCORES},
            self.received(),
            indices.astype(np.int32 if self.kv_pos.shape[1] < 2**31 else np.int64),
            largest,
            self.weights(),
            self.inputs(),
        )

    def mass(self, keys: Any) -> Array:
        """Weight on the keys that a mask allows."""
        return self._share(self.masked(keys))[..., 1]

    def _share(self, part: Partial) -> Array:
        """`sum_j w[i, j] v[j]` over the keys of a part, from its own, normalised, output."""
        with np.errstate(invalid="ignore"):
            share = np.where(np.isneginf(part.lse), 0, np.exp(part.lse - self.lse))
        return np.asarray(part.out * share[..., None])

    def _distance(self) -> Array:
        """`sum_j w |p[i] - p[j]|`, from sums of w and of w (p[j] - origin), behind and in all."""
        q_pos, out = self.own(self.q_pos - self.origin)[:, None], self.out
        if any(isinstance(variant, Causal) for variant in self.variants):
            return np.asarray(q_pos * out[..., 1] - out[..., 0])
        behind = self._share(self.masked(Causal()))
        ahead = out - behind
        return np.asarray(
            (q_pos * behind[..., 1] - behind[..., 0]) - (q_pos * ahead[..., 1] - ahead[..., 0])
        )

    def _first_keys(self) -> Array:
        """The first real key; where sequences are packed, that of each.

        None where a cache has dropped it: its oldest key is at a position above 0, and no padding.
        """
        begins = sequence_starts(self.kv_pos) & self.real
        if self.kv_pos.shape[1]:
            np.put_along_axis(begins, np.argmax(self.real, axis=1)[:, None], True, axis=1)
            begins[:, 0] &= self.real[:, 0] & (self.kv_pos[:, 0] <= 0)
        return np.asarray(begins)

    def _learned_sink(self) -> Array:
        if self.sinks is None:
            return np.zeros_like(self.lse)
        share = shares_of_sinks(self.sinks[:, None], self.lse).astype(self.lse.dtype)
        return np.where(self.own(self.real_queries)[:, None], share, 0)

    def real_keys(self, given: Any) -> Array:
        """Which keys are not padding, of what a caller gives.

        Raises
        ------
        ShapeError
            If there is not one entry for each key.
        """
        if given is None:
            return np.ones(self.kv_pos.shape, bool)
        return _per_row("real", given, self.kv_pos.shape, "key").astype(bool)

    def real_queries_of(self, given: Any, one_sequence: bool) -> Array:
        """Which queries are not padding; without `given`, as keys of the same sequence say.

        Raises
        ------
        ShapeError
            If there is not one entry for each query.
        """
        shape = self.q_pos.shape
        if given is not None:
            return _per_row("real_queries", given, shape, "query").astype(bool)
        if not one_sequence:
            return np.ones(shape, bool)
        return of_queries(self.real, self.first, shape[1], without_key=True)


def _per_row(name: str, given: Any, shape: tuple[int, ...], rows: str) -> Array:
    """An entry for each row; the dimension of the batch may lack where it is 1."""
    array = np.asarray(given)
    if array.ndim == 1 and shape[0] == 1:
        array = array[None]
    if array.shape != shape:
        raise ShapeError(
            f"{name} has shape {array.shape}; there are {shape} {rows} rows.",
            action=f"Give one entry for each batch row and {rows} row.",
        )
    return array


def checked_real(name: str, given: Any) -> Array | None:
    """Which rows are not padding, as an array; None if nobody says it.

    Raises
    ------
    DTypeError
        The entries are neither truth values nor numbers, or rows differ in length.
    """
    if given is None:
        return None
    array = view(given, name) if is_array(given) else as_array(name, given)
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise DTypeError(
            f"{name} has dtype {array.dtype}, and no truth values.",
            action=f"Pass {name} as booleans, False where a row is padding.",
        )
    return array.astype(bool)


def without_dropout(variants: tuple[Any, ...]) -> tuple[Any, ...]:
    """Scores are of the weights before it."""
    return tuple(v for v in variants if not isinstance(v, Dropout))
