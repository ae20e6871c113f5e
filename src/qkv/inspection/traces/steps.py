"""Attention of some query rows written out step by step, in float64, from the definition."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.language.evaluate import evaluate
from qkv.problem.scores import Scores

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """Softmax of scores `(..., kv_len)` in the steps in which it is computed safely.

    Attributes
    ----------
    row_max : array (...)
        Largest score, or the sink if that is larger; -inf for a row without keys or sink.
    shifted, exp : array (..., kv_len)
        `score - row_max`, and its exponential.
    sink, sink_exp : array (...) or None
        The sink and `exp(sink - row_max)`.
    row_sum : array (...)
        Sum of `exp`, and of `sink_exp`.
    weights : array (..., kv_len)
        `exp / row_sum`; 0 for a row without keys, and where a pair is forbidden.
    entropy : array (...)
        `-sum w log w`, nats.
    lse : array (...)
        `row_max + log(row_sum)`.
    """

    row_max: Array
    shifted: Array
    exp: Array
    sink: Array | None
    sink_exp: Array | None
    row_sum: Array
    weights: Array
    entropy: Array
    lse: Array

    def row(self, i: int) -> Softmax:
        """The steps of one row."""
        every: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        rows: dict[str, Any] = {name: a if a is None else a[i] for name, a in every.items()}
        return Softmax(**rows)


def softmax(scores: Array, sink: float | None = None) -> Softmax:
    """The steps of the softmax over the last axis; a score of -inf is a forbidden pair."""
    forbidden = np.isneginf(scores)
    with np.errstate(all="ignore"):
        row_max = scores.max(axis=-1, initial=-np.inf if sink is None else sink)
        shift = np.where(np.isneginf(row_max), 0.0, row_max)
        shifted = np.where(forbidden, -np.inf, scores - shift[..., None])
        exp = np.exp(shifted)
        row_sum = exp.sum(axis=-1)
        sinks = sink_exp = None
        if sink is not None:
            sinks = np.full(row_max.shape, sink)
            sink_exp = np.exp(sinks - shift)
            row_sum = row_sum + sink_exp
        weights = np.where(forbidden, 0.0, exp / row_sum[..., None])
        log_sum = np.log(row_sum)
        terms = np.where(weights == 0, 0.0, weights * (shifted - log_sum[..., None]))
        # `abs` instead of a minus sign, because minus an empty sum would be -0.
        entropy = np.abs(terms.sum(axis=-1))
        lse = np.where(np.isneginf(row_max), -np.inf, row_max + log_sum)
    return Softmax(row_max, shifted, exp, sinks, sink_exp, row_sum, weights, entropy, lse)


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """All steps of some query rows of one head; arrays are `(rows, kv_len)` unless said.

    `query` and `key` are rotated; `stages` holds the scores after each score variant and `masks`
    what each mask allows, with their labels; `scores` is final, -inf where a pair is forbidden.
    """

    batch: int
    head: int
    q_index: Array
    query: Array
    key: Array
    value: Array
    raw: Array
    scaled: Array
    stages: tuple[tuple[str, Array], ...]
    masks: tuple[tuple[str, Array], ...]
    scores: Array
    softmax: Softmax
    factors: Array | None

    @property
    def dropped(self) -> Array:
        """The weights after dropout: what the values are multiplied by."""
        weights = self.softmax.weights
        return weights if self.factors is None else weights * self.factors


def steps(scores: Scores, batch: int, head: int, q_index: Array) -> Steps:
    """Write out the rows `q_index` of one head."""
    problem, dtype = scores.problem, scores.dtype
    spec, operands = problem.spec, problem.operands
    all_keys = slice(None)
    query, key = scores.query(batch, head, q_index), scores.key(batch, head, all_keys)
    rows, columns = q_index[:, None], np.arange(spec.kv_len)[None, :]
    with np.errstate(all="ignore"):
        # Not a BLAS product, because its bits depend on the number of rows.
        raw = np.einsum("id,jd->ij", query, key)
        scaled = raw * dtype.type(operands.scale)
    indices = {"batch": batch, "head": head, "q_index": rows, "kv_index": columns}

    def at_pairs(node: Any, score: Array, kind: Any) -> Array:
        value = evaluate(node, {**indices, "score": score}, operands.tables, dtype)
        return np.broadcast_to(np.asarray(value, kind), raw.shape)

    stages: list[tuple[str, Array]] = []
    score = scaled
    for stage in spec.scores:
        score = at_pairs(stage.node, score, dtype)
        stages.append((stage.label, score))
    # A mask may be several conditions: a window has two sides.
    masks: dict[str, Array] = {}
    for condition in spec.masks:
        allows = at_pairs(condition.node, scaled, bool)
        masks[condition.label] = masks.get(condition.label, allows) & allows
    final = scores.finish(scaled, batch, head, rows, columns)
    return Steps(
        batch=batch,
        head=head,
        q_index=q_index,
        query=query,
        key=key,
        value=scores.value(batch, head, all_keys),
        raw=raw,
        scaled=scaled,
        stages=tuple(stages),
        masks=tuple(masks.items()),
        scores=final,
        softmax=softmax(final, None if operands.sinks is None else float(operands.sinks[head])),
        factors=scores.factors(batch, head, rows, columns),
    )
