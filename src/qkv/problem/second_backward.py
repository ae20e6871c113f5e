"""Tangents of attention and of its backward pass over tiles, in NumPy, written to be read.

Everything that a call reads may have a tangent, written `dot`: how it changes along one direction.
With x the scaled product, s the final score, t a table entry that s reads, `s_x` and `s_t` the
derivatives of s, and f the dropout factors, for one block of queries against one block of keys

    xdot[i,j] = scale * (qdot[i] . k[j] + q[i] . kdot[j])
    sdot[i,j] = s_x * xdot + sum_t s_t * tdot
    r[i]      = sum_j w[i,j] sdot[i,j]                               the tangent of lse
    wdot[i,j] = w[i,j] * (sdot[i,j] - r[i])
    odot[i]   = sum_j f[i,j] * (wdot[i,j] v[j] + w[i,j] vdot[j])     the tangent of the output

Each line of the backward pass has its tangent too, for cotangents dO and d lse that stay:

    dP    = f * (dO[i] . v[j])           dPdot    = f * (dO[i] . vdot[j])
    delta = sum_j w dP - d lse           deltadot = sum_j (wdot dP + w dPdot)
    dS    = w * (dP - delta)             dSdot    = wdot * (dP - delta) + w * (dPdot - deltadot)
    dX    = dS * s_x                     dXdot    = dSdot * s_x + dS * s_xdot
    dQ    = scale * sum_j dX k[j]        dQdot    = scale * sum_j (dXdot k[j] + dX kdot[j])
    dK    = scale * sum_i dX q[i]        dKdot    = scale * sum_i (dXdot q[i] + dX qdot[i])
    dV    = sum_i f w dO[i]              dVdot    = sum_i f wdot dO[i]
    dt    = sum_ij dS * s_t              dtdot    = sum_ij (dSdot * s_t + dS * s_tdot)

The right column is a product with the Hessian of `<dO, out> + <d lse, lse>`. A Hessian is
symmetric, so it is also the gradient of `<dO, odot> + <d lse, r>`: the vector-Jacobian product of
the backward pass. A sink is a key of value 0 whose score is the sink. Queries and keys are rotated
before, as are their tangents, and their gradients are rotated back.

Tiles are computed twice: first for the sums over rows, `sum_j w`, r, delta and deltadot, then for
the rest. Weights are taken from the largest score of a row as it is computed here, and divided by
their sum: another order of addition moves scores near 1e10 in float32 by a thousand, so that
`exp(s - lse)` with the lse of a backend would be infinite or 0. Forbidden pairs are excluded with
`where`, never by a product with 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.backward import OperandGradients, OperandSums, add_entries, reads, shares_of_sinks
from qkv.problem.language.derivative import derivative, tangent
from qkv.problem.language.evaluate import evaluate
from qkv.problem.language.expressions import SCORE, Load, Node, Var
from qkv.problem.scores import Scores, weighted_sum
from qkv.problem.tiles import TileGrid, TileKind

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class OperandTangents:
    """A direction: tangents of query, key and value as `Operands` holds them, and of the others.

    `tables` holds tangents of some floating tables, with their shapes; `sinks` is `(num_heads,)`.
    """

    query: Array
    key: Array
    value: Array
    tables: Mapping[str, Array]
    sinks: Array | None = None


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
    """Tangents of output and lse, and of all gradients, those of sinks per head."""

    forward: ForwardTangents
    gradients: OperandGradients
    sinks: Array


def forward_tangent(scores: Scores, grid: TileGrid, tangents: OperandTangents) -> ForwardTangents:
    """Tangents of output and lse of one problem, in the type of `scores`."""
    direction = _Direction(scores, tangents)
    forward = direction.zero_tangents()
    with np.errstate(all="ignore"):
        for block in direction.blocks(grid):
            block.sum_rows()
            forward.lse[block.index] = block.lse_dot[:, 0]
            for tile in block.tiles():
                forward.out[block.index] += tile.out_dot(*block.weights(tile))
    return forward


def second_backward(
    scores: Scores,
    grid: TileGrid,
    tangents: OperandTangents,
    cotangents: Cotangents,
) -> SecondDerivatives:
    """Tangents of one problem's output, lse and gradients, in the type of `scores`."""
    direction = _Direction(scores, tangents)
    forward, sums = direction.zero_tangents(), _GradientTangents(direction, cotangents.tables)
    with np.errstate(all="ignore"):
        for block in direction.blocks(grid):
            rows = _BackwardRows(block, cotangents)
            forward.lse[block.index] = block.lse_dot[:, 0]
            sums.sinks[block.head] += rows.d_sink_dot
            for tile in block.tiles():
                weights, weights_dot = block.weights(tile)
                forward.out[block.index] += tile.out_dot(weights, weights_dot)
                sums.add_tile(block, tile, rows, weights, weights_dot)
        return SecondDerivatives(forward, sums.gradients(), sums.sinks)


SCALED_DOT = Load("xdot", "float", ())
"""Tangents of a tile's scaled products: a table of no dimensions, which is the tile."""


class _Direction:
    """A problem, and the tangents of everything that it reads."""

    def __init__(self, scores: Scores, tangents: OperandTangents) -> None:
        self.scores = scores
        self.problem = problem = scores.problem
        self.spec, self.sinks, self.sinks_dot = problem.spec, problem.operands.sinks, tangents.sinks
        tangent_of = replace(
            problem.operands, query=tangents.query, key=tangents.key, value=tangents.value
        )
        self.tangent_scores = Scores(replace(problem, operands=tangent_of), scores.dtype)
        self.tables: dict[str, Array] = dict(problem.operands.tables)
        self.tables |= {_tangent_name(name): array for name, array in tangents.tables.items()}
        self.tangent_of: dict[Node, Node] = {SCORE: SCALED_DOT}
        for load in reads(self.spec, frozenset(tangents.tables)):
            self.tangent_of[load] = Load(_tangent_name(load.table), load.kind, load.indices)
        self.score_dot = tangent(self.spec.score, self.tangent_of)

    def blocks(self, grid: TileGrid) -> Iterator[_Block]:
        for batch, index in enumerate(np.ndindex(*self.spec.batch_shape)):
            for head in range(self.spec.num_heads):
                for q_rows, tiles in grid.blocks(batch, head):
                    yield _Block(self, batch, index, head, q_rows, tiles)

    def zero_tangents(self) -> ForwardTangents:
        """Zeros for tangents of output and lse."""
        shape = (*self.spec.batch_shape, self.spec.num_heads, self.spec.q_len)
        dtype = self.scores.dtype
        out = np.zeros((*shape, self.spec.v_head_dim), dtype)
        return ForwardTangents(out, np.zeros(shape, dtype))


def _tangent_name(table: str) -> str:
    return f"{table}dot"


class _Tile:
    """Scores of one block of queries against one block of keys, and their tangents."""

    def __init__(self, block: _Block, kv_rows: slice, kind: TileKind) -> None:
        direction, batch, head = block.direction, block.batch, block.head
        scores, tangent_scores, dtype = (
            direction.scores,
            direction.tangent_scores,
            direction.scores.dtype,
        )
        self.kv_rows, self.dtype = kv_rows, dtype
        self.key, self.key_dot = (s.key(batch, head, kv_rows) for s in (scores, tangent_scores))
        self.value, self.value_dot = (
            s.value(batch, head, kv_rows) for s in (scores, tangent_scores)
        )
        indices = {
            "batch": batch,
            "head": head,
            "q_index": np.arange(block.q_rows.start, block.q_rows.stop)[:, None],
            "kv_index": np.arange(kv_rows.start, kv_rows.stop)[None, :],
        }
        scale = dtype.type(direction.problem.operands.scale)
        scaled = scale * (block.query @ self.key.T)
        scaled_dot = scale * (block.query_dot @ self.key.T + block.query @ self.key_dot.T)
        self.variables = {**indices, "score": scaled}
        self.tables = direction.tables | {SCALED_DOT.table: scaled_dot}
        self.scores = scores.finish(scaled, **indices, kind=kind)
        self.factors = scores.factors(**indices)
        self.scores_dot = self.select(self.evaluate(direction.score_dot))

    def select(self, array: Array) -> Array:
        """0 where a pair is forbidden."""
        return np.where(np.isneginf(self.scores), self.dtype.type(0), array)

    def evaluate(self, node: Node) -> Array:
        return np.asarray(evaluate(node, self.variables, self.tables, self.dtype), self.dtype)

    def dropped(self, array: Array) -> Array:
        return array if self.factors is None else array * self.factors

    def d_weights(self, grad_out: Array) -> tuple[Array, Array]:
        """dP and its tangent."""
        d_weights, d_weights_dot = (
            self.select(self.dropped(grad_out @ value.T)) for value in (self.value, self.value_dot)
        )
        return d_weights, d_weights_dot

    def out_dot(self, weights: Array, weights_dot: Array) -> Array:
        """The contribution of these keys to the tangent of the output."""
        return weighted_sum(self.dropped(weights_dot), self.scores, self.value) + weighted_sum(
            self.dropped(weights), self.scores, self.value_dot
        )


class _Block:
    """A block of queries of one head, the tiles that it attends to, and sums over its rows."""

    def __init__(
        self,
        direction: _Direction,
        batch: int,
        index: tuple[int, ...],
        head: int,
        q_rows: slice,
        tiles: list[tuple[slice, TileKind]],
    ) -> None:
        self.direction, self.batch, self.head, self.q_rows = direction, batch, head, q_rows
        self.index: tuple[Any, ...] = (*index, head, q_rows)
        self.query, self.query_dot = (
            s.query(batch, head, q_rows) for s in (direction.scores, direction.tangent_scores)
        )
        self.dtype = direction.scores.dtype
        self._tiles = tiles
        sinks, sinks_dot = direction.sinks, direction.sinks_dot
        self._sink = np.asarray(-np.inf if sinks is None else sinks[head])
        self.sink_dot = 0.0 if sinks_dot is None else float(sinks_dot[head])
        self.peak = np.full((len(self.query), 1), self._sink, self.dtype)
        self.lse_dot = self.total = self.sink = np.zeros(self.peak.shape)

    def tiles(self) -> Iterator[_Tile]:
        """The tiles, one after the other, computed anew."""
        for kv_rows, kind in self._tiles:
            yield _Tile(self, kv_rows, kind)

    def sum_rows(self, grad_out: Array | None = None) -> tuple[Array, Array]:
        """Compute `peak`, the largest score, `total`, the sum of exp(s - peak), and `lse_dot`.

        `sink` is the sink's term of the sum. For a cotangent, return means too: of dP, and of
        `sdot dP + dPdot`. All are `(rows, 1)`, the sums in float64.
        """
        sums = np.zeros((4, *self.peak.shape))
        for tile in self.tiles():
            peak = np.maximum(self.peak, tile.scores.max(axis=1, keepdims=True))
            sums *= np.where(peak == self.peak, 1, np.exp(self.peak - peak))
            self.peak = peak
            # float64, because large terms cancel in rows where one key has nearly all the weight.
            unscaled = tile.select(np.exp(tile.scores - peak)).astype(np.float64)
            terms = [unscaled, unscaled * tile.scores_dot]
            if grad_out is not None:
                d_weights, d_weights_dot = tile.d_weights(grad_out)
                terms += [unscaled * d_weights, terms[1] * d_weights + unscaled * d_weights_dot]
            for n, term in enumerate(terms):
                sums[n] += term.sum(axis=1, keepdims=True)
        self.sink = shares_of_sinks(self._sink, self.peak)
        sums[:2] += self.sink, self.sink * self.sink_dot
        self.total = sums[0]
        self.lse_dot, d_mean, d_mean_dot = np.where(self.total == 0, 0, sums[1:] / self.total)
        return d_mean, d_mean_dot

    def weights(self, tile: _Tile) -> tuple[Array, Array]:
        """w and its tangent."""
        unscaled = tile.select(np.exp(tile.scores - self.peak))
        weights = tile.select(unscaled / self.total.astype(self.dtype))
        weights_dot = weights * (tile.scores_dot - self.lse_dot.astype(self.dtype))
        return weights, tile.select(weights_dot)


class _BackwardRows:
    """The rows of the backward pass for one block of queries, and their tangents."""

    def __init__(self, block: _Block, cotangents: Cotangents) -> None:
        dtype = block.dtype
        self.grad_out = cotangents.grad_out[block.index].astype(dtype)
        grad_lse = cotangents.grad_lse[block.index].astype(np.float64)[:, None]
        d_mean, d_mean_dot = block.sum_rows(self.grad_out)
        delta, delta_dot = d_mean - grad_lse, d_mean_dot - block.lse_dot * d_mean
        self.delta, self.delta_dot = delta.astype(dtype), delta_dot.astype(dtype)
        # The sink acts as a key with value 0, for which dP = 0.
        share = np.where(block.total == 0, 0, block.sink / block.total)
        share_dot = share * (block.sink_dot - block.lse_dot)
        self.d_sink_dot = -(share_dot * delta + share * delta_dot).sum()


class _GradientTangents(OperandSums):
    """Tangents of gradients as they grow."""

    def __init__(self, direction: _Direction, tables: frozenset[str]) -> None:
        super().__init__(direction.problem, direction.scores.dtype, tables)
        self.direction, spec = direction, direction.spec
        self.sinks = np.zeros(spec.num_heads)
        self.slope = self._with_tangent(SCORE)
        self.reads = {load: self._with_tangent(load) for load in reads(spec, tables)}

    def _with_tangent(self, wrt: Var | Load) -> tuple[Node, Node]:
        slope = derivative(self.direction.spec.score, wrt)
        return slope, tangent(slope, self.direction.tangent_of)

    def add_tile(
        self, block: _Block, tile: _Tile, rows: _BackwardRows, weights: Array, weights_dot: Array
    ) -> None:
        d_weights, d_weights_dot = tile.d_weights(rows.grad_out)
        d_scores = weights * (d_weights - rows.delta)
        d_scores_dot = weights_dot * (d_weights - rows.delta) + weights * (
            d_weights_dot - rows.delta_dot
        )

        def chain_rule(slope: Node, slope_dot: Node) -> Array:
            contribution = d_scores_dot * tile.evaluate(slope) + d_scores * tile.evaluate(slope_dot)
            return tile.select(contribution)

        for load, slopes in self.reads.items():
            add_entries(self.tables, load, tile.variables, tile.tables, chain_rule(*slopes))
        d_scaled = tile.select(d_scores * tile.evaluate(self.slope[0]))
        d_scaled_dot = chain_rule(*self.slope)
        s, q_rows, kv_rows = tile.scores, block.q_rows, tile.kv_rows
        batch, head = block.batch, block.head
        kv_head = head // self.direction.spec.group_size
        self.query[batch, head, q_rows] += weighted_sum(d_scaled_dot, s, tile.key)
        self.query[batch, head, q_rows] += weighted_sum(d_scaled, s, tile.key_dot)
        self.key[batch, kv_head, kv_rows] += weighted_sum(d_scaled_dot.T, s.T, block.query)
        self.key[batch, kv_head, kv_rows] += weighted_sum(d_scaled.T, s.T, block.query_dot)
        dropped = tile.dropped(weights_dot)
        self.value[batch, kv_head, kv_rows] += weighted_sum(dropped.T, s.T, rows.grad_out)
