"""The trace of attention as data: every number between query, key, value and output.

`docs/trace.md` describes it, `trace.schema.json` is its schema; both count as public. A change that
a reader could notice raises `VERSION`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from qkv.errors import ArgumentError
from qkv.inspection.pages import page_of
from qkv.inspection.steps import Softmax
from qkv.inspection.streaming import TileState
from qkv.inspection.trace_data import built, plain
from qkv.ledger import attention_ledger

Array = NDArray[Any]

SCHEMA, VERSION = "qkv-trace", 2


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
    """

    x: Array
    w_q: Array
    w_k: Array
    w_v: Array

    def heads(self) -> tuple[Array, Array, Array]:
        """`x @ w_q`, `x @ w_k` and `x @ w_v`."""
        return self.x @ self.w_q, self.x @ self.w_k, self.x @ self.w_v


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
        """That of the pairs that the traced rows attend to."""
        pairs = [int(row.allowed.sum()) for head in heads for row in head.rows]
        found = attention_ledger(sum(pairs), sum(map(bool, pairs)), head_dim, v_head_dim)
        counts = {name: int(count) for name, count in found.counts.items()}
        return cls(counts, found.formulas, int(found.total))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trace:
    """Attention of some rows with every intermediate number, in float64, as `qkv.explain` gives it.

    Attributes
    ----------
    problem : TracedProblem
        Sizes, dtype, scale, and the variants in words.
    tokens, kv_tokens : tuple of str or None
        Names of the query rows and of the key rows, where they were given.
    heads : tuple of TracedHead
        The traced rows of each query head.
    gradient : Gradient or None
        dQ, dK and dV over all rows, with `grad=True`.
    mechanism : TracedMechanism or None
        What was traced, if it has a name.
    projections : Projections or None
        Where the rows come from, if that was given.
    ledger : TracedLedger
        Operations of the traced pairs.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.eye(2)
    >>> trace = qkv.explain(x, x, x, q_index=1)
    >>> trace.heads[0].rows[0].softmax.weights.round(3)
    array([0.33, 0.67])
    """

    problem: TracedProblem
    tokens: tuple[str, ...] | None
    kv_tokens: tuple[str, ...] | None
    heads: tuple[TracedHead, ...]
    gradient: TracedGradients | None
    mechanism: TracedMechanism | None
    projections: Projections | None
    ledger: TracedLedger

    def __repr__(self) -> str:
        rows = sum(len(head.rows) for head in self.heads)
        return f"Trace({rows} rows of {len(self.heads)} heads, kv_len={self.problem.kv_len})"

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 100, top: int | None = None) -> str:
        """The trace to read: plain text, long lines of products folded at `width` columns.

        With `top`, only the keys with most weight of each row are printed, so many of them, and of
        the step back as many rows of each gradient; the sums are still those over all keys.
        """
        from qkv.inspection.trace_text import render

        return render(self, width, top)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, as `trace.schema.json` says.

        -inf is None; NaN and +inf are the strings "nan" and "inf".
        """
        return {"schema": SCHEMA, "version": VERSION, **plain(self)}

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trace:
        """The trace that `to_dict` gave, of this version of the schema or an earlier one.

        Raises
        ------
        ArgumentError
            It is none; the message names the first field that is wrong.
        """
        try:
            header = data["schema"], data["version"]
            fields = {name: data[name] for name in data if name not in ("schema", "version")}
        except (TypeError, LookupError):
            header, fields = ("nothing", 0), {}
        if header[0] != SCHEMA or header[1] not in range(1, VERSION + 1):
            raise ArgumentError(
                f"schema {header[0]!r:.40}, version {header[1]!r:.20} is no trace that this reads.",
                [("reads", f"{SCHEMA}, versions 1 to {VERSION}")],
                "Pass what Trace.to_json wrote.",
            )
        try:
            return built(cls, fields if header[1] == VERSION else _since_1(fields))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ArgumentError(
                f"this is no trace: {error!s:.200}.", action="Pass what Trace.to_json wrote."
            ) from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Trace:
        """The trace that `to_json` wrote, of this version of the schema or an earlier one.

        Raises
        ------
        ArgumentError
            The text is no JSON, or no trace.

        Examples
        --------
        >>> import numpy as np, qkv
        >>> x = np.eye(2)
        >>> trace = qkv.Trace.from_json(qkv.explain(x, x, x, q_index=1).to_json())
        >>> trace.heads[0].rows[0].softmax.weights.round(3)
        array([0.33, 0.67])
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(
                f"the text is no JSON: {error!s:.200}.", action="Pass what Trace.to_json wrote."
            ) from error
        return cls.from_dict(data)

    def to_html(self) -> str:
        """The trace as a page of the lab: one HTML file that works from disk, with no network.

        Returns
        -------
        str
            Everything is inside; see `qkv.lab.to_html`.
        """
        return page_of(self)


def _since_1(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of version 1 with those of version 2, of which only the counts can be known."""
    heads = [
        {**head, "rows": [{"tiles": None, **row} for row in head["rows"]]}
        for head in fields["heads"]
    ]
    problem = built(TracedProblem, fields["problem"])
    traced = [built(TracedHead, head) for head in heads]
    ledger = TracedLedger.of(traced, problem.head_dim, problem.v_head_dim)
    return {
        **fields,
        "heads": heads,
        "mechanism": None,
        "projections": None,
        "ledger": plain(ledger),
    }
