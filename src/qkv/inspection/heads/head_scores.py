"""Scores of attention heads: the weight on previous, own, duplicate and induction keys.

Every score is a sum of weights over a set of keys that depends on the query. Such a sum needs no
weights: it is one more run of attention in which a mask allows only the set,

    sum_{j in S(i)} w[i, j] = exp(lse_S[i] - lse[i]),

so that each costs a compiled pass in O(tile) memory. Sources: Elhage et al., "A Mathematical
Framework for Transformer Circuits" (2021); Olsson et al., "In-context Learning and Induction Heads"
(2022); the head detector of TransformerLens, whose three patterns are the sets used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.views import view
from qkv.call.binding.bound import BoundCall, bind
from qkv.call.binding.options import OptionValues
from qkv.call.binding.unknown_keywords import keyword_error
from qkv.call.checked import CheckedCall, check_call
from qkv.call.inspected import attend_for_inspection
from qkv.errors import KeywordError, ShapeError
from qkv.inspection.heads.kept_inputs import KeptInputs
from qkv.inspection.heads.layer_heads import (
    LayerHeads,
    checked_real,
    needs_float64,
    without_dropout,
)
from qkv.inspection.heads.score_rows import SCORES, HeadScores
from qkv.inspection.heads.unknown_tokens import ids_of
from qkv.inspection.records.key_mass import mass_of_head
from qkv.inspection.records.record import Record
from qkv.inspection.weights.lazy_weights import LazyWeights
from qkv.partial import Partial
from qkv.variants.masks.dense_mask import Mask

__all__ = [
    "KINDS", "LETTERS", "MEANINGS", "SCORES", "THRESHOLD", "HeadScores", "also", "check_keywords",
    "head_scores", "kind_of", "kinds_of",
]  # fmt: skip

Array = NDArray[Any]

KINDS = ("induction", "duplicate", "previous", "own", "sink")
"""The scores that decide the kinds of a head; ties go to the first."""

LETTERS = {"induction": "I", "duplicate": "D", "previous": "P", "own": "O", "sink": "S"}
"""One for each kind, in a map of heads."""

MEANINGS = {
    "induction": "what followed this token before",
    "duplicate": "the same token, earlier",
    "previous": "the token before",
    "own": "the token itself",
    "sink": "the first token, or a learned sink",
}
"""Where a head of each kind puts most of its weight."""

THRESHOLD = 0.4
"""The smallest mean score with which a head counts as of a kind; a convention."""


_KEYWORDS = (
    "name", "tokens", "real", "real_queries", "scale", "q_offset", "kv_offset", "one_sequence",
    "sequences",
)  # fmt: skip


def check_keywords(given: Mapping[str, Any]) -> None:
    """Raise an error for keywords that `ModelRecord.add` does not take."""
    if "layout" in given:
        raise KeywordError(
            "ModelRecord.add takes no layout.",
            action="Pass (batch, heads, length, head_dim), as query.swapaxes(-3, -2) is.",
        )
    if not given.keys() <= set(_KEYWORDS):
        raise keyword_error("ModelRecord.add", given, _KEYWORDS, ("name",), called=("query", "key"))


def head_scores(
    query: Any,
    key: Any,
    *variants: Any,
    tokens: Any = None,
    real: Any = None,
    real_queries: Any = None,
    scale: float | None = None,
    q_offset: Any = None,
    kv_offset: Any = 0,
    top: int = 4,
    one_sequence: bool = True,
) -> HeadScores:
    """Scores of every head of one layer; values are not needed.

    With weights w and positions p, for a query i:

        entropy       -sum_j w[i, j] log w[i, j]
        sink          w[i, first key of the sequence, 0 if no cache holds it] + learned_sink
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
        Token of each key row; queries are among them. Without it, no duplicate and induction. A
        negative one is unknown: it is equal to no other in these two scores. (kv_len,) where batch
        is 1, here and below.
    real : boolean array (batch, kv_len), optional
        False where a key row is padding.
    real_queries : boolean array (batch, q_len), optional
        False where a query row is padding; by default, in one sequence, what `real` says.
    top : int
        Keys to keep of each query.
    one_sequence : bool
        False if queries and keys are of two sequences, as in cross-attention: scores that compare
        positions are NaN then.

    Returns
    -------
    HeadScores

    Raises
    ------
    ShapeError
        Query, key, tokens and real do not fit together.
    DTypeError
        Tokens are not numbers, or `real` holds texts.

    Notes
    -----
    float32, float64 for float64 input and where the scores are so large (beyond about 800) that
    differences of lse would show their rounding. Cost: about five forward passes with v_head_dim 2;
    memory O(length), the weights are never there. Positions are exact below 2**24.

    A mean is over the queries that are not padding, may use some key, and have a key as the score
    names it. On a random sequence that is repeated once,
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
    tokens = None if tokens is None else ids_of(tokens)
    real, real_queries = checked_real("real", real), checked_real("real_queries", real_queries)
    for name, given, of in (("tokens", tokens, key), ("real", real, key),
                            ("real_queries", real_queries, query)):  # fmt: skip
        if given is not None and np.shape(given)[-1:] == of.shape[1:2] != of.shape[2:3]:
            raise _heads_where_rows_are(name, given, query, key)
    options = {"scale": scale, "q_offset": q_offset, "kv_offset": kv_offset}
    rows = real, real_queries, one_sequence
    heads = _WholeLayer(query, key, variants, options, *rows)
    if needs_float64(heads.lse) and query.dtype != np.float64:
        float64_inputs = (query.astype(np.float64), key.astype(np.float64))
        heads = _WholeLayer(*float64_inputs, variants, options, *rows)
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
    kinds = [name for name in KINDS if np.nan_to_num(scores[name]) >= THRESHOLD]
    return tuple(sorted(kinds, key=lambda name: (name == "sink", -scores[name])))


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


class _WholeLayer(LayerHeads):
    """A layer whose keys this process holds."""

    def __init__(
        self,
        query: Array,
        key: Array,
        variants: tuple[Any, ...],
        options: dict[str, Any],
        real: Any,
        real_queries: Any,
        one_sequence: bool,
    ) -> None:
        dtype = np.dtype(np.float64 if query.dtype == np.float64 else np.float32)
        self._query, self._key = (np.asarray(array, dtype) for array in (query, key))
        self._options = options
        self.variants = without_dropout(variants)
        q_batch, _, q_len, _ = self._query.shape
        if len(self._key) != q_batch and 1 not in (len(self._key), q_batch):
            raise ShapeError(
                f"query has a batch of {q_batch} and key one of {len(self._key)}.",
                action="Let them be equal, or 1 where all rows have the same.",
            )
        # The batch that both are broadcast to; one of no rows stays one of no rows.
        batch = len(self._key) if q_batch == 1 else q_batch
        kv_len = self._key.shape[2]
        self._value: Array = np.zeros((batch, 1, kv_len, 2), dtype)
        try:
            checked = self._bind()
        except ShapeError as error:
            raise _without_value(error) from None
        positions = checked.problem.operands.positions
        self.q_pos = np.broadcast_to(positions.query_positions(), (batch, q_len))
        self.kv_pos = np.broadcast_to(positions.key_positions(), (batch, kv_len))
        self._value[:, 0, :, 0] = self.kv_pos - self.origin
        self._value[..., 1] = 1
        self.real = self.real_keys(real)
        self.real_queries = self.real_queries_of(real_queries, one_sequence)
        if not self.real_queries.all():
            self.variants += (Mask(self.real_queries[:, None, :, None]),)
        self.record = Record(attend_for_inspection(self._bound()))
        self.lse, self.out = self.record.lse, self.record.output
        self.entropy, self.max_weight = self.record.entropy, self.record.max_weight
        self.sinks = self._bind().problem.operands.sinks

    def masked(self, keys: Any) -> Partial:
        return self._bind(keys).run()

    def mass_at(self, offset: int) -> Array:
        return np.asarray(self.record.mass_at(offset))

    def mass_of(self, keys: Array) -> Array:
        """Weight on these keys, by the products of these alone, since they are few."""
        replay = self.record.weights.replay
        mass = np.zeros_like(self.lse)
        for batch, chosen in enumerate(keys):
            numbers = np.flatnonzero(chosen)
            for head in range(mass.shape[1] if mass.shape[2] and len(numbers) else 0):
                mass[batch, head] = mass_of_head(replay, batch, head, numbers)
        return mass

    def received(self) -> Array:
        return np.asarray(self.record.received)

    def top(self, k: int) -> tuple[Array, Array]:
        return self.record.top(k)

    def weights(self) -> LazyWeights:
        return self.record.weights

    def inputs(self) -> KeptInputs:
        return KeptInputs(self._query, self._key, self.variants, self._options)

    def _bound(self, *more: Any) -> BoundCall:
        num_kv_heads = self._key.shape[1]
        value = np.broadcast_to(
            self._value, (self._value.shape[0], num_kv_heads, *self._value.shape[2:])
        )
        variants = (*self.variants, *more)
        return bind(self._query, self._key, value, variants, OptionValues(**self._options))

    def _bind(self, *more: Any) -> CheckedCall:
        return check_call(self._bound(*more))


def _without_value(error: ShapeError) -> ShapeError:
    """The error without the value, which is made here, and without a keyword that none takes."""
    seen = [(name, row) for name, row in error.seen if name != "value"]
    action = error.action
    return ShapeError(error.fact, seen, _HEADS_FIRST if "layout=" in action else action)


_HEADS_FIRST = (
    "Arrays are read as (batch, heads, length, head_dim). If yours are (batch, length, heads, "
    "head_dim), pass query.swapaxes(-3, -2), and key so."
)


def _heads_where_rows_are(name: str, given: Any, query: Array, key: Array) -> ShapeError:
    """The error for as many entries as an array seems to have heads."""
    which, array = ("query", query) if name == "real_queries" else ("key", key)
    _, heads, rows, _ = array.shape
    return ShapeError(
        f"{name} has {heads} entries, and {which} {rows} rows of {heads} heads.",
        [("query", str(query.shape)), ("key", str(key.shape)), (name, str(tuple(np.shape(given))))],
        _HEADS_FIRST,
    )


def _with_batch(array: Any, name: str) -> Array:
    seen: Array = view(array, name)
    if seen.ndim not in (3, 4):
        raise ShapeError(
            f"{name} has shape {seen.shape}.",
            action="Pass (batch, heads, length, head_dim), or without batch.",
        )
    return seen.reshape((1,) * (4 - seen.ndim) + seen.shape)
