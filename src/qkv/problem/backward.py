"""The backward pass over tiles in NumPy, written to be read.

Weights are recomputed from the scores and the lse of each row, so that no matrix is kept.
For one block of queries against one block of keys,

    w[i,j]  = exp(s[i,j] - lse[i])
    dP[i,j] = f[i,j] * (dO[i] . v[j])                   f: dropout factors, 1 without
    dS[i,j] = w[i,j] * (dP[i,j] - delta[i])             delta[i] = dO[i] . out[i] - d lse[i]
    dX[i,j] = dS[i,j] * d s[i,j] / d x[i,j]             x: scaled product, s: final score
    dQ[i]  += scale * sum_j dX[i,j] R k[j],             dK[j] += scale * sum_i dX[i,j] R q[i]
    dV[j]  += sum_i f[i,j] w[i,j] dO[i]

and a table entry t gets the sum of dS[i,j] * d s[i,j] / d t. The subtraction of delta is the
derivative of the softmax: `delta = sum_j w[j] dP[j]`, which equals dO[i] . out[i]. Forbidden pairs
are excluded with `where`, never by a product with 0. The rounding error of lse would change every
weight of a row, so `lse_rest` corrects it; and scores are recomputed in the order of the forward
pass, so that the weights match the output. Source: Dao et al.,
"FlashAttention" (2022), algorithm 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.language.derivative import derivative
from qkv.problem.language.evaluate import evaluate
from qkv.problem.language.expressions import Load, Node, walk
from qkv.problem.scores import Scores, weighted_sum
from qkv.problem.spec import Problem, Spec
from qkv.problem.tiles import TileGrid, TileKind

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class BackwardInputs:
    """The inputs of a backward pass.

    `out` `(*batch_shape, num_heads, q_len, v_head_dim)` is the output and `lse`
    `(*batch_shape, num_heads, q_len)` its lse in the type of computation, sinks included.
    `lse_rest` is the rounding error of lse, or None if it is not known. `grad_out` is like `out`,
    in the type of the query, `grad_lse` like `lse`. `tables` names the floating tables of the score
    whose gradients are wanted. `of_part` says that the problem has only some of the keys over which
    `out` and `lse` were taken; a backward pass then takes both as they are.
    """

    out: Array
    lse: Array
    grad_out: Array
    grad_lse: Array
    tables: frozenset[str] = frozenset()
    lse_rest: Array | None = None
    of_part: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class OperandGradients:
    """Gradients of query, key and value as `Operands` holds them, and of tables.

    Those of operands have all leading dimensions of the batch, also where the operand has one row
    for all; they come in the type of computation, or rounded to the operand's.
    """

    query: Array
    key: Array
    value: Array
    tables: Mapping[str, Array]


def shares_of_sinks(sinks: Array, lse: Array) -> Array:
    """`exp(sink - lse)` in float64, as broadcast; 0 for a sink of -inf, 1 for one of infinity."""
    sinks, lse = sinks.astype(np.float64), lse.astype(np.float64)
    with np.errstate(all="ignore"):
        return np.where(np.isinf(sinks), sinks > 0, np.exp(sinks - lse))


def reads(spec: Spec, names: frozenset[str]) -> tuple[Load, ...]:
    """The places at which the score reads these tables."""
    return tuple(n for n in walk(spec.score) if isinstance(n, Load) and n.table in names)


def backward(scores: Scores, grid: TileGrid, inputs: BackwardInputs) -> OperandGradients:
    """All gradients of one problem, in the type of `scores`, by the tiles of a grid."""
    spec = scores.problem.spec
    sums = _GradientSums(scores, inputs)
    for batch, index in enumerate(np.ndindex(*spec.batch_shape)):
        for head in range(spec.num_heads):
            for q_rows, tiles in grid.blocks(batch, head):
                rows = _QueryBlock(inputs, (*index, head, q_rows), scores.dtype)
                for kv_rows, kind in tiles:
                    sums.add_tile(batch, head, q_rows, kv_rows, kind, rows)
    return sums.gradients()


class _QueryBlock:
    """The rows of the inputs for one block of queries."""

    def __init__(self, inputs: BackwardInputs, index: tuple[Any, ...], dtype: np.dtype[Any]):
        rest = np.zeros_like(inputs.lse) if inputs.lse_rest is None else inputs.lse_rest
        self.lse, self.lse_rest, grad_lse = (
            array[index].astype(dtype)[:, None] for array in (inputs.lse, rest, inputs.grad_lse)
        )
        self.grad_out = inputs.grad_out[index].astype(dtype)
        # float64, because dP and delta nearly cancel where one key has nearly all the weight.
        self.grad_out_float64 = self.grad_out.astype(np.float64)
        with np.errstate(all="ignore"):
            products = self.grad_out_float64 * inputs.out[index].astype(np.float64)
            row_sums = products.sum(axis=1, keepdims=True)
            self.delta = row_sums - grad_lse


class OperandSums:
    """Gradients of operands and tables as they grow, the batch flat."""

    def __init__(self, problem: Problem, dtype: np.dtype[Any], tables: frozenset[str]) -> None:
        self.problem = problem
        spec, arrays = problem.spec, problem.operands.tables
        kv_shape = spec.batch_size, spec.num_kv_heads, spec.kv_len
        self.query = np.zeros((spec.batch_size, spec.num_heads, spec.q_len, spec.head_dim), dtype)
        self.key = np.zeros((*kv_shape, spec.head_dim), dtype)
        self.value = np.zeros((*kv_shape, spec.v_head_dim), dtype)
        # float64, because many pairs add to one entry.
        self.tables = {name: np.zeros(arrays[name].shape) for name in sorted(tables)}

    def gradients(self) -> OperandGradients:
        """The gradients, scaled and rotated back, in the shapes of the operands."""
        operands = self.problem.operands
        scale = self.query.dtype.type(operands.scale)
        with np.errstate(all="ignore"):
            query, key = scale * self.query, scale * self.key
        query, key = query.reshape(operands.query.shape), key.reshape(operands.key.shape)
        value = self.value.reshape(operands.value.shape)
        return OperandGradients(*rotate_back(self.problem, query, key), value, self.tables)


class _GradientSums(OperandSums):
    """Gradients, to which tiles are added."""

    def __init__(self, scores: Scores, inputs: BackwardInputs) -> None:
        super().__init__(scores.problem, scores.dtype, inputs.tables)
        self.scores = scores
        spec = self.problem.spec
        self.slope = derivative(spec.score)
        self.reads = {load: derivative(spec.score, load) for load in reads(spec, inputs.tables)}

    def add_tile(
        self,
        batch: int,
        head: int,
        q_rows: slice,
        kv_rows: slice,
        kind: TileKind,
        rows: _QueryBlock,
    ) -> None:
        scores, dtype, operands = self.scores, self.scores.dtype, self.problem.operands
        q_index, kv_index = (np.arange(r.start, r.stop) for r in (q_rows, kv_rows))
        indices = {
            "batch": batch, "head": head, "q_index": q_index[:, None],
            "kv_index": kv_index[None, :],
        }  # fmt: skip
        query, key = scores.query(batch, head, q_rows), scores.key(batch, head, kv_rows)
        value = scores.value(batch, head, kv_rows)
        factors = scores.factors(**indices)
        with np.errstate(all="ignore"):
            scaled = (query @ key.T) * dtype.type(operands.scale)
            variables = {**indices, "score": scaled}
            s = scores.finish(scaled, **indices, kind=kind)
            allowed = ~np.isneginf(s)
            weights = np.where(allowed, np.exp((s - rows.lse) - rows.lse_rest), dtype.type(0))
            d_weights = rows.grad_out_float64 @ value.T.astype(np.float64)
            dropped = weights
            if factors is not None:
                d_weights, dropped = d_weights * factors, weights * factors
            d_scores = (weights * (d_weights - rows.delta)).astype(dtype)

            def chain_rule(slope: Node) -> Array:
                slopes = evaluate(slope, variables, operands.tables, dtype)
                contribution = d_scores * np.asarray(slopes, dtype)
                return np.asarray(np.where(allowed, contribution, dtype.type(0)))

            for load, slope in self.reads.items():
                add_entries(self.tables, load, variables, operands.tables, chain_rule(slope))
            d_scaled = chain_rule(self.slope)
        kv_head = head // self.problem.spec.group_size
        self.query[batch, head, q_rows] += weighted_sum(d_scaled, s, key)
        self.key[batch, kv_head, kv_rows] += weighted_sum(d_scaled.T, s.T, query)
        self.value[batch, kv_head, kv_rows] += weighted_sum(dropped.T, s.T, rows.grad_out)


def add_entries(
    sums: Mapping[str, Array],
    load: Load,
    variables: Mapping[str, Any],
    tables: Mapping[str, Array],
    shares: Array,
) -> None:
    """Add each pair's share to the entry that it read."""
    entry = [evaluate(index, variables, tables, shares.dtype) for index in load.indices]
    # One more index, always 0, so that tables without dimensions need no case of their own.
    *entry, _ = np.broadcast_arrays(*entry, 0, shares)
    np.add.at(sums[load.table][..., None], tuple(entry), shares)


def rotate_back(problem: Problem, d_query: Array, d_key: Array) -> tuple[Array, Array]:
    """Take gradients back through the rotation.

    The transpose of a rotation is the rotation by the opposite angle; the factor is unchanged.
    """
    spec, angles = problem.spec, problem.operands.angles
    if angles is None:
        return d_query, d_key
    operands = replace(
        problem.operands,
        query=d_query,
        key=d_key,
        angles=replace(angles, inv_freq=-angles.inv_freq),
    )
    scores = Scores(replace(problem, operands=operands), d_query.dtype)
    rotated_query, rotated_key = np.empty_like(d_query), np.empty_like(d_key)
    for batch, index in enumerate(np.ndindex(*spec.batch_shape)):
        for head in range(spec.num_heads):
            rotated_query[(*index, head)] = scores.query(batch, head, slice(None))
        for kv_head in range(spec.num_kv_heads):
            head = kv_head * spec.group_size
            rotated_key[(*index, kv_head)] = scores.key(batch, head, slice(None))
    return rotated_query, rotated_key
