"""The tangents of output and lse along a direction, and those of all gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.backward import OperandGradients, OperandSums, add_entries, reads
from qkv.problem.language.derivative import ZERO, derivative, tangent
from qkv.problem.language.expressions import SCORE, Load, Node, Var
from qkv.problem.scores import Scores, of_all_heads, weighted_sum
from qkv.problem.second_derivatives.tangents import Block, Direction, OperandTangents, Tile
from qkv.problem.spec import Problem
from qkv.problem.tiles import TileGrid

__all__ = ["Cotangents", "ForwardTangents", "SecondDerivatives", "second_derivatives"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Cotangents:
    """`grad_out` like the output, `grad_lse` like lse; tables whose gradients are wanted."""

    grad_out: Array
    grad_lse: Array
    tables: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class ForwardTangents:
    """`out` `(*batch_shape, num_heads, q_len, v_head_dim)`, `lse` `(..., q_len)`."""

    out: Array
    lse: Array


@dataclass(frozen=True, slots=True, eq=False)
class SecondDerivatives:
    """Tangents of output and lse, and for cotangents of all gradients, those of sinks per head."""

    forward: ForwardTangents
    gradients: OperandGradients | None = None
    sinks: Array | None = None


_BLOCK = 128
"""Queries, and keys, of a tile: few, so that causal masks leave many tiles out."""


def second_derivatives(
    problem: Problem, tangents: OperandTangents, cotangents: Cotangents | None = None
) -> SecondDerivatives:
    """Tangents of output and lse, and for cotangents those of the gradients."""
    scores = Scores(problem, problem.spec.compute_dtype)
    direction, grid = Direction(scores, tangents), scores.grid(_BLOCK, _BLOCK)
    with np.errstate(all="ignore"):
        if cotangents is None:
            return SecondDerivatives(_forward_tangents(direction, grid))
        return _second_derivatives(direction, grid, cotangents)


def _forward_tangents(direction: Direction, grid: TileGrid) -> ForwardTangents:
    forward = _zero_tangents(direction)
    for block in direction.blocks(grid):
        block.sum_rows()
        forward.lse[block.index] = block.lse_dot[..., 0]
        for tile in block.tiles():
            forward.out[block.index] += tile.out_dot(*block.weights(tile))
    return _in_batch(direction, forward)


def _second_derivatives(
    direction: Direction, grid: TileGrid, cotangents: Cotangents
) -> SecondDerivatives:
    forward, sums = _zero_tangents(direction), _GradientTangents(direction, cotangents.tables)
    grad_out, grad_lse = (
        given.reshape(like.shape)
        for given, like in ((cotangents.grad_out, forward.out), (cotangents.grad_lse, forward.lse))
    )
    for block in direction.blocks(grid, grad_out):
        rows = _BackwardRows(block, grad_lse)
        forward.lse[block.index] = block.lse_dot[..., 0]
        np.add.at(sums.sinks, block.heads.head[:, 0, 0], rows.d_sink_dot)
        for tile in block.tiles():
            weights, weights_dot = block.weights(tile)
            forward.out[block.index] += tile.out_dot(weights, weights_dot)
            sums.add_tile(block, tile, rows, weights, weights_dot)
    return SecondDerivatives(_in_batch(direction, forward), sums.gradients(), sums.sinks)


def _zero_tangents(direction: Direction) -> ForwardTangents:
    """Zeros for tangents of output and lse, the heads of all batch rows on one axis."""
    shape = (direction.spec.batch_size * direction.spec.num_heads, direction.spec.q_len)
    dtype = direction.scores.dtype
    return ForwardTangents(
        np.zeros((*shape, direction.spec.v_head_dim), dtype), np.zeros(shape, dtype)
    )


def _in_batch(direction: Direction, forward: ForwardTangents) -> ForwardTangents:
    """The same in the shape of the batch."""
    shape = (*direction.spec.batch_shape, direction.spec.num_heads)
    out, lse = (a.reshape(*shape, *a.shape[1:]) for a in (forward.out, forward.lse))
    return ForwardTangents(out, lse)


class _BackwardRows:
    """The rows of the backward pass for one block of queries, and their tangents."""

    def __init__(self, block: Block, grad_lse: Array) -> None:
        dtype = block.dtype
        d_mean, less_dot = block.sum_rows()
        # Less what they are at the peak, as are dP and dPdot when these are subtracted.
        less = d_mean - grad_lse[block.index].astype(np.float64)[..., None]
        self.delta, self.delta_dot = less.astype(dtype), less_dot.astype(dtype)
        delta = less + block.at_peak.d_weights
        delta_dot = less_dot + block.at_peak.d_weights_dot
        # The sink acts as a key with value 0, for which dP = 0.
        share = np.where(block.total == 0, 0, block.sink / block.total)
        share_dot = share * (block.sink_dot - block.lse_dot)
        self.d_sink_dot = -(share_dot * delta + share * delta_dot).sum(axis=(-2, -1))


class _GradientTangents(OperandSums):
    """Tangents of gradients as they grow."""

    def __init__(self, direction: Direction, tables: frozenset[str]) -> None:
        super().__init__(direction.problem, direction.scores.dtype, tables)
        self.direction, spec = direction, direction.spec
        self.sinks = np.zeros(spec.num_heads)
        self.slope = self._with_tangent(SCORE)
        self.reads = {load: self._with_tangent(load) for load in reads(spec, tables)}

    def _with_tangent(self, wrt: Var | Load) -> tuple[Node, Node]:
        slope = derivative(self.direction.spec.score, wrt)
        return slope, tangent(slope, self.direction.tangent_of)

    def add_tile(
        self, block: Block, tile: Tile, rows: _BackwardRows, weights: Array, weights_dot: Array
    ) -> None:
        d_weights, d_weights_dot = tile.less_d_weights(block.at_peak)
        d_weights = d_weights - rows.delta
        d_scores = weights * d_weights
        d_scores_dot = weights_dot * d_weights + weights * (d_weights_dot - rows.delta_dot)

        def chain_rule(slope: Node, slope_dot: Node) -> Array:
            along = _product(d_scores_dot, tile.evaluate(slope))
            if slope_dot != ZERO:
                along = along + d_scores * tile.evaluate(slope_dot)
            return tile.select(along)

        for load, slopes in self.reads.items():
            add_entries(self.tables, load, tile.variables, tile.tables, chain_rule(*slopes))
        d_scaled = tile.select(_product(d_scores, tile.evaluate(self.slope[0])))
        d_scaled_dot = chain_rule(*self.slope)
        s, s_of_keys, heads = tile.scores, tile.scores.mT, block.heads
        query, key, value = (of_all_heads(a) for a in (self.query, self.key, self.value))
        query[block.index] += weighted_sum(d_scaled_dot, s, tile.key)
        query[block.index] += weighted_sum(d_scaled, s, tile.key_dot)
        d_key = weighted_sum(d_scaled_dot.mT, s_of_keys, block.query)
        d_key += weighted_sum(d_scaled.mT, s_of_keys, block.query_dot)
        heads.add_of_keys(key, tile.kv_rows, d_key)
        dropped = tile.dropped(weights_dot)
        d_value = weighted_sum(dropped.mT, s_of_keys, block.grad_out)
        heads.add_of_keys(value, tile.kv_rows, d_value)


def _product(array: Array, slope: Array) -> Array:
    """`array * slope`, for which nothing is to be done where no score mod is."""
    return array if slope.ndim == 0 and slope == 1 else array * slope
