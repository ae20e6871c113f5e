"""Scores of attention heads: the weight on previous, own, duplicate and induction keys.

Every score is a sum of weights over a set of keys that depends on the query. Such a sum needs no
weights: it is one more run of attention in which a mask allows only the set,

    sum_{j in S(i)} w[i, j] = exp(lse_S[i] - lse[i]),

so that each costs a compiled pass in O(tile) memory. Sources: Elhage et al., "A Mathematical
Framework for Transformer Circuits" (2021); Olsson et al., "In-context Learning and Induction Heads"
(2022); the head detector of TransformerLens, whose three patterns are the sets used here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.views import view
from qkv.call.bound import BoundCall, bind
from qkv.call.checked import CheckedCall, check_call
from qkv.call.inspected import attend_for_inspection
from qkv.call.options import OptionValues
from qkv.errors import ShapeError
from qkv.inspection.earlier_tokens import EarlierToken, Tokens, sequence_starts
from qkv.inspection.kept_inputs import KeptInputs
from qkv.inspection.record import Record
from qkv.inspection.weights import LazyWeights
from qkv.partial import Partial, coarse
from qkv.variants.causal import Causal
from qkv.variants.dense_mask import Mask
from qkv.variants.dropout import Dropout

__all__ = [
    "KINDS", "LETTERS", "MEANINGS", "SCORES", "THRESHOLD", "HeadScores", "also", "head_scores",
    "kind_of", "kinds_of",
]  # fmt: skip

Array = NDArray[Any]

SCORES = (
    "entropy",
    "sink",
    "learned_sink",
    "previous",
    "own",
    "duplicate",
    "induction",
    "distance",
    "max_logit",
)

KINDS = ("induction", "duplicate", "previous", "own", "sink")
"""The scores that decide the kinds of a head; ties go to the first."""

LETTERS = {"induction": "I", "duplicate": "D", "previous": "P", "own": "O", "sink": "S"}
"""One for each kind, in a map of heads."""

MEANINGS = {
    "induction": "what followed this token before",
    "duplicate": "the same token, earlier",
    "previous": "the token before",
    "own": "the token itself",
    "sink": "the first token, or a sink",
}
"""Where a head of each kind puts most of its weight."""

THRESHOLD = 0.4
"""The smallest mean score with which a head counts as of a kind; a convention."""

_ROUNDING = 1e-4
"""A layer is computed in float64 if the relative error of its scores would exceed this."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadScores:
    """The scores of the heads of one layer.

    Attributes
    ----------
    rows : dict of str to array (batch, num_heads, q_len)
        Each of `SCORES`, query by query; NaN where it does not apply (no tokens known, or keys of
        another sequence than the queries').
    counted : dict of str to boolean array (batch, q_len)
        The queries that `means` averages over: no padding, and for previous, own, duplicate and
        induction only queries that have such a key.
    received : array (batch, num_heads, kv_len)
        Weight that each key takes in all, from queries that are no padding.
    top_keys, top_weights : array (batch, num_heads, q_len, top)
        The keys with the largest weights, falling; padded with -1 and 0.
    weights : LazyWeights (batch, num_heads, q_len, kv_len) or None
        Holds query and key; rows of padding are 0.
    inputs : KeptInputs or None
        What the weights come from, as it can be kept in a file.
    """

    rows: dict[str, Array]
    counted: dict[str, Array]
    received: Array
    top_keys: Array
    top_weights: Array
    weights: LazyWeights | None
    inputs: KeptInputs | None = None

    def means(self) -> dict[str, Array]:
        """Each score, `(num_heads,)`: the mean over batch and counted queries.

        The largest for `max_logit`; NaN where no query counts.
        """
        return {
            name: _mean_over_queries(name, self.rows[name], self.counted[name]) for name in SCORES
        }

    def sums(self) -> tuple[Array, Array]:
        """What means over several texts are made of.

        Returns
        -------
        (float64 array (len(SCORES), num_heads), int64 array (len(SCORES),))
            Each score, added up over batch and counted queries (the largest for `max_logit`, -inf
            where no query counts), and how many queries count.
        """
        sums, counts = [], []
        for name in SCORES:
            chosen = np.swapaxes(self.rows[name], 0, 1)[:, self.counted[name]].astype(np.float64)
            largest = name == "max_logit"
            sums.append(chosen.max(axis=1, initial=-np.inf) if largest else chosen.sum(axis=1))
            counts.append(chosen.shape[1])
        return np.stack(sums), np.array(counts)


def head_scores(
    query: Any,
    key: Any,
    *variants: Any,
    tokens: Any = None,
    real: Any = None,
    scale: float | None = None,
    q_offset: Any = None,
    kv_offset: Any = 0,
    top: int = 4,
    one_sequence: bool = True,
) -> HeadScores:
    """Scores of every head of one layer; values are not needed.

    With weights w and positions p, for a query i:

        entropy       -sum_j w[i, j] log w[i, j]
        sink          w[i, first key of the sequence] + learned_sink
        learned_sink  exp(sink[head] - lse[i])
        previous      w[i, j] at p[j] = p[i] - 1
        own           w[i, j] at p[j] = p[i]
        duplicate     sum of w[i, j] over p[j] < p[i] with token[j] = token[i]
        induction     sum of w[i, j] over p[j] <= p[i] with token[j - 1] = token[i]
        distance      sum_j w[i, j] |p[i] - p[j]|
        max_logit     max_j s[i, j]

    Parameters
    ----------
    query : array (batch, num_heads, q_len, head_dim)
        Or without batch.
    key : array (batch, num_kv_heads, kv_len, head_dim)
    *variants, scale, q_offset, kv_offset
        As for `qkv.attention`. Dropout is left out: scores are of the weights before it.
    tokens : integer array (batch, kv_len), optional
        Token of each key row; queries are among them. Without it, no duplicate and induction.
    real : boolean array (batch, kv_len), optional
        False where a row is padding.
    top : int
        Keys to keep of each query.
    one_sequence : bool
        False if queries and keys are of two sequences, as in cross-attention: scores that compare
        positions are NaN then.

    Returns
    -------
    HeadScores

    Notes
    -----
    float32, float64 for float64 input and where the scores are so large (beyond about 800) that
    differences of lse would show their rounding. Cost: about five forward passes with v_head_dim 2;
    memory O(length), the weights are never there. Positions are exact below 2**24.

    A mean is over the queries that have such a key. On a random sequence that is repeated once,
    `induction` is then the induction score of Olsson et al.: the mean weight from each token of the
    second half on what followed it in the first.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = 4 * np.eye(4)[None]
    >>> scores = head_scores(np.roll(x, -1, axis=2), x, qkv.Causal())
    >>> scores.means()["previous"].round(3)
    array([0.999])
    """
    query, key = (_with_batch(array, name) for array, name in ((query, "query"), (key, "key")))
    heads = _LayerHeads(query, key, variants, scale, q_offset, kv_offset, real)
    if coarse(heads.record.lse, _ROUNDING).any() and query.dtype != np.float64:
        float64_inputs = (query.astype(np.float64), key.astype(np.float64))
        heads = _LayerHeads(*float64_inputs, variants, scale, q_offset, kv_offset, real)
    return heads.scores(tokens, top, one_sequence)


def kinds_of(scores: dict[str, float]) -> tuple[str, ...]:
    """The kinds of head, of `KINDS`, that a head's mean scores speak for, the main one first.

    A head has each kind whose score reaches `THRESHOLD`. `sink` comes last: heads rest on the first
    token where what they look for is not there, and it counts all queries, the other kinds only
    those to which they can apply.

    Examples
    --------
    >>> kinds_of({"induction": 0.6, "duplicate": 0.1, "previous": 0.2, "own": 0.0, "sink": 0.7})
    ('induction', 'sink')
    """
    found = [name for name in KINDS if np.nan_to_num(scores[name]) >= THRESHOLD]
    return tuple(sorted(found, key=lambda name: (name == "sink", -scores[name])))


def kind_of(scores: dict[str, float]) -> str | None:
    """The first of `kinds_of`, or None.

    Examples
    --------
    >>> kind_of({"induction": 0.7, "duplicate": 0.1, "previous": 0.2, "own": 0.0, "sink": 0.1})
    'induction'
    """
    return (*kinds_of(scores), None)[0]


def also(scores: dict[str, float]) -> str | None:
    """The second of `kinds_of`, or None.

    Examples
    --------
    >>> also({"induction": 0.6, "duplicate": 0.1, "previous": 0.2, "own": 0.0, "sink": 0.7})
    'sink'
    """
    return (*kinds_of(scores), None, None)[1]


class _LayerHeads:
    """One layer as a problem of attention whose values are positions."""

    def __init__(
        self,
        query: Array,
        key: Array,
        variants: tuple[Any, ...],
        scale: float | None,
        q_offset: Any,
        kv_offset: Any,
        real: Any,
    ) -> None:
        dtype = np.dtype(np.float64 if query.dtype == np.float64 else np.float32)
        self._query, self._key = (np.asarray(array, dtype) for array in (query, key))
        self._options = {"scale": scale, "q_offset": q_offset, "kv_offset": kv_offset}
        self._variants = tuple(v for v in variants if not isinstance(v, Dropout))
        batch, _, q_len, _ = self._query.shape
        kv_len = self._key.shape[2]
        self._value: Array = np.zeros((batch, 1, kv_len, 2), dtype)
        positions = self._bind().problem.operands.positions
        self.q_pos = np.broadcast_to(positions.query_positions(), (batch, q_len))
        self.kv_pos = np.broadcast_to(positions.key_positions(), (batch, kv_len))
        self._value[:, 0, :, 0] = self.kv_pos
        self._value[..., 1] = 1
        self.real = self._real_keys(real)
        self.counted = self.real[:, self.first : self.first + q_len]
        if self.counted.shape[1] != q_len:
            self.counted = np.ones((batch, q_len), bool)
        if not self.counted.all():
            self._variants += (Mask(self.counted[:, None, :, None]),)
        self.record = Record(attend_for_inspection(self._bound()))
        self.sinks = self._bind().problem.operands.sinks

    @property
    def first(self) -> int:
        """The key row at the position of query row 0; no row if there is none."""
        kv_len: int = self._key.shape[2]
        if not (self.q_pos.size and self.kv_pos.size):
            return kv_len
        rows = np.flatnonzero(self.kv_pos[0] == self.q_pos[0, 0])
        return int(rows[0]) if len(rows) else kv_len

    def scores(self, tokens: Any, top: int, one_sequence: bool) -> HeadScores:
        record, counted = self.record, self.counted
        lse, weights, out = record.lse, record.weights, record.output
        none = np.full(lse.shape, np.nan, lse.dtype)
        rows = dict.fromkeys(SCORES, none)
        with np.errstate(divide="ignore", invalid="ignore"):
            rows["max_logit"] = lse + np.log(record.max_weight)
        rows["entropy"] = record.entropy
        rows["learned_sink"] = self._learned_sink()
        rows["sink"] = self._first_key() + rows["learned_sink"]
        queries = dict.fromkeys(SCORES, counted)
        if one_sequence:
            rows["previous"], rows["own"] = record.mass_at(-1), record.mass_at(0)
            rows["distance"] = self._distance(out, lse)
            queries["previous"] = counted & self._has_key_at(-1)
            queries["own"] = counted & self._has_key_at(0)
        if one_sequence and tokens is not None and self.first < self._key.shape[2]:
            ids = np.broadcast_to(np.asarray(tokens), self.kv_pos.shape)
            token_table = Tokens.of(ids, self.real, self.first, self.q_pos, self.kv_pos)
            for name, keys in (
                ("duplicate", token_table.duplicates),
                ("induction", token_table.followers),
            ):
                rows[name] = self._mass(keys, lse)
                queries[name] = counted & token_table.queries_with(keys)
        indices, largest = record.top(top)
        rows = {name: np.asarray(row, lse.dtype) for name, row in rows.items()}
        return HeadScores(
            rows,
            queries,
            record.received,
            indices.astype(np.int32),
            largest,
            weights,
            KeptInputs(self._query, self._key, self._variants, self._options),
        )

    def _bound(self, *more: Any) -> BoundCall:
        num_kv_heads = self._key.shape[1]
        value = np.broadcast_to(
            self._value, (self._value.shape[0], num_kv_heads, *self._value.shape[2:])
        )
        variants = (*self._variants, *more)
        return bind(self._query, self._key, value, variants, OptionValues(**self._options))

    def _bind(self, *more: Any) -> CheckedCall:
        return check_call(self._bound(*more))

    def _real_keys(self, real: Any) -> Array:
        if real is None:
            return np.ones(self.kv_pos.shape, bool)
        given = np.asarray(real)
        if given.shape != self.kv_pos.shape:
            raise ShapeError(
                f"real has shape {given.shape}; there are {self.kv_pos.shape} key rows.",
                action="Give one entry for each batch row and key row.",
            )
        return given.astype(bool)

    def _mass(self, keys: EarlierToken, lse: Array) -> Array:
        """Weight on the keys that a mask allows."""
        return self._share(self._bind(keys).run(), lse)[..., 1]

    def _share(self, part: Partial, lse: Array) -> Array:
        """`sum_j w[i, j] v[j]` over the keys of a part, from its own, normalised, output."""
        with np.errstate(invalid="ignore"):
            share = np.where(np.isneginf(part.lse), 0, np.exp(part.lse - lse))
        return np.asarray(part.out * share[..., None])

    def _distance(self, out: Array, lse: Array) -> Array:
        """`sum_j w |p[i] - p[j]|`, from the sums of w and of w p[j], behind and in all."""
        q_pos = self.q_pos[:, None]
        if any(isinstance(variant, Causal) for variant in self._variants):
            return np.asarray(q_pos * out[..., 1] - out[..., 0])
        behind = self._share(self._bind(Causal()).run(), lse)
        ahead = out - behind
        return np.asarray(
            (q_pos * behind[..., 1] - behind[..., 0]) - (q_pos * ahead[..., 1] - ahead[..., 0])
        )

    def _first_key(self) -> Array:
        """Weight on the first real key; where sequences are packed, on that of the query's own."""
        replay = self.record.weights.replay
        mass = np.zeros_like(self.record.lse)
        rows = np.arange(mass.shape[2])
        begins = sequence_starts(self.kv_pos)
        for batch, real in enumerate(self.real):
            begin = begins[batch] & real
            begin[np.argmax(real)] = True
            keys = np.flatnonzero(begin)
            for head in range(mass.shape[1] if mass.shape[2] and len(keys) else 0):
                mass[batch, head] = replay.block(batch, head, rows, keys).sum(axis=1)
        return np.asarray(mass)

    def _learned_sink(self) -> Array:
        lse = self.record.lse
        if self.sinks is None:
            return np.zeros_like(lse)
        share = np.exp(self.sinks.astype(lse.dtype)[:, None] - lse)
        return np.where(self.counted[:, None], share, 0)

    def _has_key_at(self, offset: int) -> Array:
        """Whether each query has a key `offset` positions away."""
        rows = zip(self.q_pos, self.kv_pos, self.real, strict=True)
        return np.stack([np.isin(q_pos + offset, kv_pos[real]) for q_pos, kv_pos, real in rows])


def _with_batch(array: Any, name: str) -> Array:
    seen: Array = view(array, name)
    if seen.ndim not in (3, 4):
        raise ShapeError(
            f"{name} has shape {seen.shape}.",
            action="Pass (batch, heads, length, head_dim), or without batch.",
        )
    return seen.reshape((1,) * (4 - seen.ndim) + seen.shape)


def _mean_over_queries(name: str, rows: Array, counted: Array) -> Array:
    """Mean, or largest, over batch and counted queries: `(num_heads,)`."""
    chosen: Array = np.swapaxes(rows, 0, 1)[:, counted]
    if not chosen.size:
        return np.full(rows.shape[1], np.nan)
    reduce: Callable[..., Array] = np.max if name == "max_logit" else np.mean
    return np.asarray(reduce(chosen.astype(np.float64), axis=1))
