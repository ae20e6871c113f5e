"""What a trace holds: rows, heads, gradients and counts, each a frozen record of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from qkv.arrays.copies import own_copy
from qkv.inspection.traces.steps import Softmax
from qkv.inspection.traces.streaming import TileState
from qkv.ledger import attention_ledger

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class TracedProblem:
    """The problem of a trace: the variants in words, sizes, and the scale.

    `rotation` is the label of the rotary embedding; `dropout` is its probability.
    """

    summary: str
    dtype: str
    batch_shape: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    scale: float
    rotation: str | None
    dropout: float | None


@dataclass(frozen=True, slots=True, eq=False)
class ScoreStage:
    """Scores of a row after one score variant, `(kv_len,)`."""

    label: str
    scores: Array


@dataclass(frozen=True, slots=True, eq=False)
class MaskStage:
    """The keys that one mask allows a row, `(kv_len,)`."""

    label: str
    allowed: Array


@dataclass(frozen=True, slots=True, eq=False)
class Slope:
    """Derivative of one score variant with respect to the score before it, `(kv_len,)`."""

    label: str
    values: Array


@dataclass(frozen=True, slots=True, eq=False)
class RowGradients:
    """The step back through one row, in the order in which it is taken.

    Attributes
    ----------
    cotangent : array (v_head_dim,)
        dO, what the output row is multiplied with.
    d_weights : array (kv_len,)
        `dO . v[j]`, times the dropout factor.
    jacobian : array (kv_len, kv_len)
        `diag(w) - w w^T`: how each weight changes with each score.
    d_scores : array (kv_len,)
        `jacobian @ d_weights`.
    slopes : tuple of Slope
        One for each score variant.
    d_scaled, d_raw : array (kv_len,)
        Behind all slopes; and times the scale.
    d_query : array (head_dim,)
        dQ of this row, rotated back.
    """

    cotangent: Array
    d_weights: Array
    jacobian: Array
    d_scores: Array
    slopes: tuple[Slope, ...]
    d_scaled: Array
    d_raw: Array
    d_query: Array


@dataclass(frozen=True, slots=True, eq=False)
class TracedRow:
    """One query row of one head, from products to output.

    Attributes
    ----------
    q_index, q_pos : int
        Row in storage, and position.
    query, rotated_query : array (head_dim,)
        As given, and after the rotary embedding (None without one).
    products : array (kv_len, head_dim)
        `query[d] * key[d]` of the rotated rows.
    raw, scaled : array (kv_len,)
        Sums of the products; and times the scale.
    stages, masks : tuple
        Scores after each score variant; what each mask allows.
    allowed, scores : array (kv_len,)
        What the row attends to in the end; final scores, -inf where it does not.
    softmax : Softmax
        Its steps.
    factors : array (kv_len,) or None
        Dropout factors of the weights.
    contributions : array (kv_len, v_head_dim)
        What each value adds to the output; 0 where forbidden.
    output : array (v_head_dim,)
        Their sum.
    tiles : tuple of TileState or None
        The states of the streaming algorithm, with `block_kv=`.
    back : RowGradients or None
        With `grad=True`.
    """

    q_index: int
    q_pos: int
    query: Array
    rotated_query: Array | None
    products: Array
    raw: Array
    scaled: Array
    stages: tuple[ScoreStage, ...]
    masks: tuple[MaskStage, ...]
    allowed: Array
    scores: Array
    softmax: Softmax
    factors: Array | None
    contributions: Array
    output: Array
    tiles: tuple[TileState, ...] | None
    back: RowGradients | None


@dataclass(frozen=True, slots=True, eq=False)
class TracedHead:
    """Keys and values of one query head, and its chosen rows.

    `batch` is the flat index over the leading dimensions; arrays are `(kv_len, dim)`.
    """

    batch: int
    head: int
    kv_head: int
    kv_pos: Array
    key: Array
    rotated_key: Array | None
    value: Array
    rows: tuple[TracedRow, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TracedGradients:
    """dQ, dK and dV over all rows and heads, shaped and laid out as query, key and value."""

    cotangent: Array
    d_query: Array
    d_key: Array
    d_value: Array


@dataclass(frozen=True, slots=True, eq=False)
class Projections:
    """Where query, key and value of one head come from: `query = x @ w_q`, and so on.

    Attributes
    ----------
    x : array (length, embed_dim)
        One row for each token.
    w_q, w_k : array (embed_dim, head_dim)
    w_v : array (embed_dim, v_head_dim)
        Weights, which multiply from the right.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> projections = qkv.Projections(np.eye(2), 2 * np.eye(2), np.eye(2), np.eye(2))
    >>> trace = qkv.explain(*projections.heads(), projections=projections)
    >>> trace.projections.w_q[0].tolist()
    [2.0, 0.0]
    """

    x: Array
    w_q: Array
    w_k: Array
    w_v: Array

    def heads(self) -> tuple[Array, Array, Array]:
        """`x @ w_q`, `x @ w_k` and `x @ w_v`."""
        return self.x @ self.w_q, self.x @ self.w_k, self.x @ self.w_v

    def kept(self) -> Projections:
        """The same in copies, for a trace."""
        return Projections(*map(own_copy, (self.x, self.w_q, self.w_k, self.w_v)))


@dataclass(frozen=True, slots=True)
class TracedMechanism:
    """The attention mechanism that was traced, as `qkv.mechanisms` names it."""

    name: str
    formula: str
    paper: str


@dataclass(frozen=True, slots=True)
class TracedLedger:
    """Scalar operations of the traced rows, by step and kind, with their closed forms."""

    counts: dict[str, int]
    formulas: dict[str, str]
    total: int

    @classmethod
    def of(cls, heads: Sequence[TracedHead], head_dim: int, v_head_dim: int) -> TracedLedger:
        """The ledger of the pairs that the traced rows attend to."""
        pairs = [int(row.allowed.sum()) for head in heads for row in head.rows]
        ledger = attention_ledger(sum(pairs), sum(map(bool, pairs)), head_dim, v_head_dim)
        counts = {name: int(count) for name, count in ledger.counts.items()}
        return cls(counts, ledger.formulas, int(ledger.total))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TraceFields:
    """The fields of `qkv.Trace`, which documents them."""

    problem: TracedProblem
    tokens: tuple[str, ...] | None
    kv_tokens: tuple[str, ...] | None
    heads: tuple[TracedHead, ...]
    gradient: TracedGradients | None
    mechanism: TracedMechanism | None
    projections: Projections | None
    ledger: TracedLedger
