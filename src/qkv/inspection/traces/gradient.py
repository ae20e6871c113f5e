"""The step back: from a cotangent of the output to query, key and value, in float64.

    dP[i,j] = f[i,j] * (dO[i] . v[j])              f: dropout factors, 1 without
    dS[i,j] = w[i,j] * (dP[i,j] - sum_k w[i,k] dP[i,k])
    dX[i,j] = dS[i,j] * d s[i,j] / d x[i,j]         x: scaled product, s: final score
    dQ[i]   = R^T scale * sum_j dX[i,j] R k[j],     dK[j] = R^T scale * sum_i dX[i,j] R q[i]
    dV[j]   = sum_i f[i,j] w[i,j] dO[i]

Forbidden pairs are left out by selection, never by multiplying with 0, so that nothing that hides
behind a mask can reach a gradient. Source: Dao et al., "FlashAttention" (2022), appendix B.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.reference import DENSE_LIMIT
from qkv.errors import UnsupportedError
from qkv.inspection.traces.steps import Steps, steps
from qkv.ledger import memory
from qkv.problem.backward import rotate_back
from qkv.problem.language.derivative import derivative
from qkv.problem.language.evaluate import evaluate
from qkv.problem.scores import Scores, weighted_sum
from qkv.problem.spec import Problem, Spec

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class BackwardSteps:
    """Gradients of some rows with respect to what each step gave; arrays `(rows, kv_len)`.

    `slopes` holds the derivative of each score stage with respect to the score before it.
    """

    d_weights: Array
    d_scores: Array
    slopes: tuple[tuple[str, Array], ...]
    d_scaled: Array
    d_raw: Array


def backward_steps(problem: Problem, forward: Steps, cotangent: Array) -> BackwardSteps:
    """Undo the steps of some rows, for the cotangent `(rows, v_head_dim)` of their outputs."""
    allowed = ~np.isneginf(forward.scores)
    weights = forward.softmax.weights
    with np.errstate(all="ignore"):
        d_weights = cotangent @ forward.value.T
        if forward.factors is not None:
            d_weights = d_weights * forward.factors
        d_weights = np.where(allowed, d_weights, 0.0)
        mean = (weights * d_weights).sum(axis=1, keepdims=True)
        d_scores = np.where(allowed, weights * (d_weights - mean), 0.0)
        slopes = _slopes(problem, forward)
        d_scaled = d_scores
        for _, slope in reversed(slopes):
            d_scaled = np.where(allowed, d_scaled * slope, 0.0)
        d_raw = d_scaled * problem.operands.scale
    return BackwardSteps(d_weights, d_scores, slopes, d_scaled, d_raw)


def _slopes(problem: Problem, forward: Steps) -> tuple[tuple[str, Array], ...]:
    indices = {
        "batch": forward.batch,
        "head": forward.head,
        "q_index": forward.q_index[:, None],
        "kv_index": np.arange(problem.spec.kv_len)[None, :],
    }
    slopes = []
    before = forward.scaled
    for stage, (label, after) in zip(problem.spec.scores, forward.stages, strict=True):
        slope = evaluate(
            derivative(stage.node),
            {**indices, "score": before},
            problem.operands.tables,
            before.dtype,
        )
        slopes.append((label, np.broadcast_to(np.asarray(slope, before.dtype), before.shape)))
        before = after
    return tuple(slopes)


def gradients(problem: Problem, cotangent: Array) -> tuple[Array, Array, Array]:
    """dQ, dK and dV for a cotangent `(*batch_shape, num_heads, q_len, v_head_dim)`.

    Each has the shape of its view in `Operands`, the leading dimensions broadcast. Holds one head's
    matrices at a time, and refuses beyond the reference limit.
    """
    spec, operands = problem.spec, problem.operands
    _check_size(spec)
    scores = Scores(problem, np.dtype(np.float64))
    d_query = np.zeros(operands.query.shape)
    d_key = np.zeros(operands.key.shape)
    d_value = np.zeros(operands.value.shape)
    rows = np.arange(spec.q_len)
    for batch, index in enumerate(np.ndindex(*spec.batch_shape)):
        for head in range(spec.num_heads):
            q_head, kv_head = (*index, head), (*index, head // spec.group_size)
            forward = steps(scores, batch, head, rows)
            back = backward_steps(problem, forward, cotangent[q_head])
            scores_by_key = forward.scores.T
            d_query[q_head] = weighted_sum(back.d_raw, forward.scores, forward.key)
            d_key[kv_head] += weighted_sum(back.d_raw.T, scores_by_key, forward.query)
            d_value[kv_head] += weighted_sum(forward.dropped.T, scores_by_key, cotangent[q_head])
    return (*rotate_back(problem, d_query, d_key), d_value)


def _check_size(spec: Spec) -> None:
    matrices = 14 + 2 * len(spec.scores) + len(spec.masks)
    size = 8 * matrices * spec.q_len * spec.kv_len
    if size > DENSE_LIMIT:
        raise UnsupportedError(
            f"the step back would hold {memory(size)} for one head (limit {memory(DENSE_LIMIT)}).",
            [("problem", f"q_len={spec.q_len}, kv_len={spec.kv_len}, {matrices} float64 matrices")],
            "Explain fewer queries and keys, or leave out grad=True.",
        )
