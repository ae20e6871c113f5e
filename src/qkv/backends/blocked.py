"""Online softmax over tiles in NumPy, written to be read.

Each block of queries is computed against one block of keys at a time. Three running values for
each query row are enough: the largest score so far, the sum of exp(score - largest), and the sum
of values with these weights. When the largest score grows, the two sums are rescaled. Sources:
Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021); Dao et al., "FlashAttention"
(2022), algorithm 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Refusal, ensure_residuals
from qkv.partial import Partial, rest_of
from qkv.problem.backward import BackwardInputs, OperandGradients, backward
from qkv.problem.overflow import finite_or_recomputed
from qkv.problem.scores import Scores, pair_bytes, weighted_sum
from qkv.problem.spec import Problem, Spec
from qkv.problem.tiles import TileRun

Array = NDArray[Any]

BLOCK_Q, BLOCK_KV = 256, 512


class BlockedBackend:
    """Runs every problem in O(n) memory; slower than `cpu`, but readable."""

    name = "blocked"
    priority = 50
    stored_rows = True

    def refusals(self, spec: Spec) -> tuple[Refusal, ...]:
        return ()

    def blocks(self, spec: Spec) -> tuple[int, int]:
        return BLOCK_Q, BLOCK_KV

    def scratch_bytes(self, spec: Spec) -> int:
        block_q, block_kv = min(BLOCK_Q, spec.q_len), min(BLOCK_KV, spec.kv_len)
        rows = block_q * (spec.head_dim + 2 * spec.v_head_dim) + block_kv * (
            spec.head_dim + spec.v_head_dim
        )
        dtype = spec.compute_dtype
        return block_q * block_kv * pair_bytes(spec, dtype) + rows * dtype.itemsize

    def run(self, problem: Problem) -> Partial:
        return finite_or_recomputed(problem, self._run)

    def _run(self, problem: Problem) -> Partial:
        spec = problem.spec
        scores = Scores(problem, spec.compute_dtype)
        grid = scores.grid(*self.blocks(spec))
        shape = (spec.batch_size, spec.num_heads, spec.q_len, spec.v_head_dim)
        out = np.zeros(shape, spec.compute_dtype)
        lse = np.full(shape[:-1], -np.inf, spec.compute_dtype)
        rest = np.zeros_like(lse)
        for batch in range(spec.batch_size):
            for head in range(spec.num_heads):
                for i, kinds in grid.query_blocks(batch, head):
                    rows = slice(i * grid.block_q, min((i + 1) * grid.block_q, spec.q_len))
                    place = batch, head, rows
                    out[place], lse[place], rest[place] = attend(
                        scores, *place, grid.runs(kinds), grid.block_kv
                    )
        full = (*spec.batch_shape, *shape[1:])
        return Partial(out.reshape(full), lse.reshape(full[:-1]), rest.reshape(full[:-1]))

    def run_for_backward(self, problem: Problem) -> Partial:
        return self.run(problem)

    def backward(self, problem: Problem, inputs: BackwardInputs) -> OperandGradients:
        scores = Scores(problem, problem.spec.compute_dtype)
        inputs = ensure_residuals(problem, inputs, self.run_for_backward)
        return backward(scores, scores.grid(*self.blocks(problem.spec)), inputs)


def attend(
    scores: Scores, batch: int, head: int, q_rows: slice, runs: list[TileRun], block_kv: int
) -> tuple[Array, Array, Array]:
    """Output rows, lse and its rest, of one block of queries over the runs of keys it may see."""
    dtype = scores.dtype
    count = q_rows.stop - q_rows.start
    row_max = np.full(count, -np.inf, dtype)
    row_sum = np.zeros(count, dtype)
    total = np.zeros((count, scores.problem.spec.v_head_dim), dtype)
    for run in runs:
        for start in range(run.start, run.stop, block_kv):
            kv_rows = slice(start, min(start + block_kv, run.stop))
            s = scores.tile(batch, head, q_rows, kv_rows, run.kind)
            with np.errstate(all="ignore"):
                new_max = np.maximum(row_max, s.max(axis=1))
                # A row without allowed keys so far has maximum -inf, and is shifted by 0 instead.
                shift = np.where(np.isneginf(new_max), dtype.type(0), new_max)
                weights = np.exp(s - shift[:, None])
                rescale = np.exp(row_max - shift)
                row_sum = row_sum * rescale + weights.sum(axis=1)
                factors = scores.factors(
                    batch,
                    head,
                    np.arange(q_rows.start, q_rows.stop)[:, None],
                    np.arange(kv_rows.start, kv_rows.stop)[None, :],
                )
                if factors is not None:
                    weights = weights * factors
                total *= rescale[:, None]
                total += weighted_sum(weights, s, scores.value(batch, head, kv_rows))
                row_max = new_max
    empty = np.isneginf(row_max)
    with np.errstate(all="ignore"):
        out = total / np.where(empty, dtype.type(1), row_sum)[:, None]
        log_sum = np.log(row_sum, dtype=np.float64)
        lse = np.where(empty, -np.inf, row_max + log_sum).astype(dtype)
    return out, lse, rest_of(row_max, log_sum, lse)
