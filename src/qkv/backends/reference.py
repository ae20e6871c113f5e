"""The whole score matrix in float64, as the formula is written."""

from __future__ import annotations

import numpy as np

from qkv.backends import Refusal, ensure_residuals
from qkv.partial import Partial, rest_of
from qkv.problem.backward import BackwardInputs, OperandGradients, backward
from qkv.problem.overflow import finite_or_recomputed
from qkv.problem.scores import Scores, pair_bytes, weighted_sum
from qkv.problem.spec import Problem, Spec
from qkv.problem.tiles import TileKind
from qkv.process.forks import importing

DENSE_LIMIT = 2 * 2**30
"""Bytes that the scores, weights and mask of one head may take."""


def dense_bytes(spec: Spec) -> int:
    """Bytes of the float64 scores, weights and mask of one head."""
    return spec.q_len * spec.kv_len * (3 * 8 + 1)


class ReferenceBackend:
    """Dense float64; holds one head's q_len x kv_len matrix, and says so."""

    name = "reference"
    priority = 0
    stored_rows = True

    def refusals(self, spec: Spec) -> tuple[Refusal, ...]:
        size = dense_bytes(spec)
        if size > DENSE_LIMIT:
            with importing():
                from qkv.ledger import memory

            return (
                Refusal(f"would hold {memory(size)} of scores", f"up to {memory(DENSE_LIMIT)}"),
            )
        return ()

    def blocks(self, spec: Spec) -> tuple[int, int]:
        return max(spec.q_len, 1), max(spec.kv_len, 1)

    def scratch_bytes(self, spec: Spec) -> int:
        rows = 8 * (spec.q_len + spec.kv_len) * (spec.head_dim + spec.v_head_dim)
        return spec.q_len * spec.kv_len * pair_bytes(spec, np.dtype(np.float64)) + rows

    def run(self, problem: Problem) -> Partial:
        return finite_or_recomputed(problem, self._run)

    def _run(self, problem: Problem) -> Partial:
        spec = problem.spec
        scores = Scores(problem, np.dtype(np.float64))
        shape = (spec.batch_size, spec.num_heads, spec.q_len, spec.v_head_dim)
        out = np.zeros(shape)
        row_max, log_sum = np.full(shape[:-1], -np.inf), np.zeros(shape[:-1])
        q_rows, kv_rows = slice(0, spec.q_len), slice(0, spec.kv_len)
        for batch in range(spec.batch_size if 0 not in (spec.q_len, spec.kv_len) else 0):
            for head in range(spec.num_heads):
                s = scores.tile(batch, head, q_rows, kv_rows, TileKind.PARTIAL)
                with np.errstate(all="ignore"):
                    peak = s.max(axis=1)
                    empty = np.isneginf(peak)
                    weights = np.exp(s - np.where(empty, 0.0, peak)[:, None])
                    row_sum = weights.sum(axis=1)
                    weights /= np.where(empty, 1.0, row_sum)[:, None]
                    factors = scores.factors(
                        batch, head, np.arange(spec.q_len)[:, None], np.arange(spec.kv_len)[None]
                    )
                    if factors is not None:
                        weights *= factors
                    out[batch, head] = weighted_sum(weights, s, scores.value(batch, head, kv_rows))
                    row_max[batch, head] = peak
                    log_sum[batch, head] = np.where(empty, 0.0, np.log(row_sum))
        full = (*spec.batch_shape, *shape[1:])
        with np.errstate(all="ignore"):
            lse = (row_max + log_sum).astype(spec.compute_dtype)
            rest = rest_of(row_max, log_sum, lse)
            rows = (array.reshape(full[:-1]) for array in (lse, rest))
            return Partial(out.reshape(full).astype(spec.compute_dtype), *rows)

    def run_for_backward(self, problem: Problem) -> Partial:
        return self.run(problem)

    def backward(self, problem: Problem, inputs: BackwardInputs) -> OperandGradients:
        scores = Scores(problem, np.dtype(np.float64))
        inputs = ensure_residuals(problem, inputs, self.run_for_backward)
        return backward(scores, scores.grid(*self.blocks(problem.spec)), inputs)
