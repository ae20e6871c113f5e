"""Blocks of queries of some heads, the tiles that they attend to, and how their numbers move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.problem.backward import reads, shares_of_sinks
from qkv.problem.language.derivative import tangent
from qkv.problem.language.evaluate import evaluate
from qkv.problem.language.expressions import SCORE, Load, Node
from qkv.problem.scores import Scores, weighted_sum
from qkv.problem.tiles import TileGrid, TileKind

__all__ = ["Block", "Direction", "OperandTangents", "Tile"]

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


SCALED_DOT = Load("xdot", "float", ())
"""Tangents of a tile's scaled products: a table of no dimensions, which is the tile."""

_TILE = 2**17
"""Pairs of queries and keys in a tile of several heads; heads of one key head may have more."""

_KEPT = 2**19
"""Pairs of a block of queries up to which its tiles are kept from the first pass to the second."""


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """Some heads that are computed together, of one batch row or of several.

    `query` and `key` are their places among the query heads, and the key heads that these read, of
    the whole batch; `batch` and `head` are `(heads, 1, 1)`.
    """

    query: slice
    key: slice | Array
    batch: Array
    head: Array

    @classmethod
    def of(cls, first: int, stop: int, num_heads: int, group_size: int) -> Heads:
        """The query heads that read the key heads from `first` to `stop`."""
        query = slice(first * group_size, stop * group_size)
        places = np.arange(query.start, query.stop)
        batch, head = np.divmod(places[:, None, None], num_heads)
        key = slice(first, stop) if group_size == 1 else places // group_size
        return cls(query, key, batch, head)

    def pairs(self) -> list[tuple[int, int]]:
        """Batch index and head of each."""
        return list(zip(self.batch.ravel().tolist(), self.head.ravel().tolist(), strict=True))

    def add_of_keys(self, sums: Array, rows: slice, parts: Array) -> None:
        """Add what each query head gives to the rows of the key head that it reads."""
        if isinstance(self.key, slice):
            sums[self.key, rows] += parts
        else:
            for place, part in zip(self.key, parts, strict=True):
                sums[place, rows] += part


class OperandRows(NamedTuple):
    """Rotated rows of all heads in the type of scores, each `(batch_size * heads, rows, dim)`."""

    query: Array
    key: Array
    value: Array
    query_dot: Array
    key_dot: Array
    value_dot: Array


class Direction:
    """A problem, and the tangents of everything that it reads."""

    def __init__(self, scores: Scores, tangents: OperandTangents) -> None:
        self.scores = scores
        self.problem = problem = scores.problem
        self.spec, self.sinks, self.sinks_dot = problem.spec, problem.operands.sinks, tangents.sinks
        moves = replace(
            problem.operands, query=tangents.query, key=tangents.key, value=tangents.value
        )
        self.moves = replace(problem, operands=moves)
        """The problem whose query, key and value are the tangents."""
        self.tables: dict[str, Array] = dict(problem.operands.tables)
        self.tables |= {_tangent_name(name): array for name, array in tangents.tables.items()}
        self.tangent_of: dict[Node, Node] = {SCORE: SCALED_DOT}
        for load in reads(self.spec, frozenset(tangents.tables)):
            self.tangent_of[load] = Load(_tangent_name(load.table), load.kind, load.indices)
        self.score_dot = tangent(self.spec.score, self.tangent_of)

    @cached_property
    def rows(self) -> OperandRows:
        moves = Scores(self.moves, self.scores.dtype)
        return OperandRows(*self.scores.rows_of_all_heads(), *moves.rows_of_all_heads())

    def blocks(self, grid: TileGrid, grad_out: Array | None = None) -> Iterator[Block]:
        """Each block of queries, of as many heads as fill a tile, with its rows of a cotangent."""
        for heads in self._heads(grid):
            for q_rows, tiles in grid.blocks_of(heads.pairs()):
                yield Block(self, heads, q_rows, tiles, grad_out)

    def _heads(self, grid: TileGrid) -> Iterator[Heads]:
        """All heads in parts.

        Those that read one key head are in one part, so that the order of its sums does not depend
        on which other heads are computed with them.
        """
        spec = self.spec
        key_heads = spec.batch_size * spec.num_kv_heads
        pairs = min(grid.block_q, grid.q_len) * min(grid.block_kv, grid.kv_len) * spec.group_size
        together = max(1, _TILE // max(1, pairs))
        for first in range(0, key_heads, together):
            stop = min(first + together, key_heads)
            yield Heads.of(first, stop, spec.num_heads, spec.group_size)


def _tangent_name(table: str) -> str:
    return f"{table}dot"


class Peak(NamedTuple):
    """The tangent of the score, dP and its tangent, for the key with the largest score of a row.

    Sums over a row are taken of differences from these. Where one key has nearly all the weight,
    large terms would cancel otherwise, and rounding would be all that is left.
    """

    scores_dot: Array
    d_weights: Array
    d_weights_dot: Array


class Tile:
    """Scores of one block of queries against one block of keys, and their tangents."""

    def __init__(self, block: Block, kv_rows: slice, kind: TileKind) -> None:
        direction, heads, rows = block.direction, block.heads, block.direction.rows
        scores, dtype = direction.scores, direction.scores.dtype
        self.kv_rows, self.dtype, self.grad_out = kv_rows, dtype, block.grad_out
        self.key, self.key_dot, self.value, self.value_dot = (
            array[heads.key, kv_rows]
            for array in (rows.key, rows.key_dot, rows.value, rows.value_dot)
        )
        indices = {
            "batch": heads.batch,
            "head": heads.head,
            "q_index": np.arange(block.q_rows.start, block.q_rows.stop)[:, None],
            "kv_index": np.arange(kv_rows.start, kv_rows.stop)[None, :],
        }
        scale = dtype.type(direction.problem.operands.scale)
        scaled = scale * (block.query @ self.key.mT)
        scaled_dot = scale * (block.query_dot @ self.key.mT + block.query @ self.key_dot.mT)
        self.variables = {**indices, "score": scaled}
        self.tables = direction.tables | {SCALED_DOT.table: scaled_dot}
        self.scores = scores.finish(scaled, **indices, kind=kind)
        allowed = ~np.isneginf(self.scores)
        bits = np.dtype(f"u{dtype.itemsize}")
        self._allowed_bits = None if allowed.all() else np.negative(allowed.astype(bits))
        self._exp: tuple[Array, Array] | None = None
        self.factors = scores.factors(**indices)
        self.scores_dot = self.select(self.evaluate(direction.score_dot))

    def select(self, array: Array) -> Array:
        """0 where a pair is forbidden, in place of NaN too.

        All bits are cleared there, which takes a tenth of the time of `where`.
        """
        kept = self._allowed_bits
        return array if kept is None else (array.view(kept.dtype) & kept).view(self.dtype)

    def evaluate(self, node: Node) -> Array:
        return np.asarray(evaluate(node, self.variables, self.tables, self.dtype), self.dtype)

    def exp(self, peak: Array) -> Array:
        """`exp(scores - peak)`, which is kept for the next time if that has the same peak."""
        if self._exp is None or not np.array_equal(self._exp[0], peak):
            self._exp = peak, self.select(np.exp(self.scores - peak))
        return self._exp[1]

    def dropped(self, array: Array) -> Array:
        return array if self.factors is None else array * self.factors

    @cached_property
    def d_weights(self) -> tuple[Array, Array]:
        """dP and its tangent."""
        d_weights, d_weights_dot = (
            self.select(self.dropped(self.grad_out @ value.mT))
            for value in (self.value, self.value_dot)
        )
        return d_weights, d_weights_dot

    @property
    def moving(self) -> tuple[Array, ...]:
        """What `Peak` has of each key; without a cotangent there is no dP."""
        return (self.scores_dot,) if self.grad_out is None else (self.scores_dot, *self.d_weights)

    def less_d_weights(self, peak: Peak) -> tuple[Array, Array]:
        """dP and its tangent, less what they are at the peak."""
        d_weights, d_weights_dot = self.d_weights
        return d_weights - peak.d_weights, d_weights_dot - peak.d_weights_dot

    def out_dot(self, weights: Array, weights_dot: Array) -> Array:
        """The contribution of these keys to the tangent of the output."""
        return weighted_sum(self.dropped(weights_dot), self.scores, self.value) + weighted_sum(
            self.dropped(weights), self.scores, self.value_dot
        )


class Block:
    """A block of queries of some heads, the tiles that it attends to, and sums over its rows."""

    def __init__(
        self,
        direction: Direction,
        heads: Heads,
        q_rows: slice,
        tiles: list[tuple[slice, TileKind]],
        grad_out: Array | None,
    ) -> None:
        self.direction, self.heads, self.q_rows = direction, heads, q_rows
        self.index = heads.query, q_rows
        rows = direction.rows
        self.query, self.query_dot = rows.query[self.index], rows.query_dot[self.index]
        self.dtype = direction.scores.dtype
        # Without a cotangent there is no dP, and nobody asks for it.
        self.grad_out: Any = None if grad_out is None else grad_out[self.index].astype(self.dtype)
        self._tiles = tiles
        self._kept: list[Tile] | None = None
        sinks, sinks_dot = direction.sinks, direction.sinks_dot
        self._sink = np.asarray(-np.inf, self.dtype)
        if sinks is not None:
            with np.errstate(over="ignore"):
                self._sink = sinks[heads.head].astype(self.dtype)
        self.sink_dot = np.asarray(0.0)
        if sinks_dot is not None:
            self.sink_dot = np.where(np.isneginf(self._sink), 0, sinks_dot[heads.head])
        self.peak = np.full((*self.query.shape[:2], 1), self._sink, self.dtype)
        nothing = np.zeros(self.peak.shape, self.dtype)
        self.at_peak = Peak(nothing + self.sink_dot.astype(self.dtype), nothing, nothing)
        self.moved = self.total = self.sink = np.zeros(self.peak.shape)

    def tiles(self) -> Iterator[Tile]:
        """The tiles, one after the other; those of many keys are computed anew each time."""
        if self._kept is None:
            made = (Tile(self, kv_rows, kind) for kv_rows, kind in self._tiles)
            keys = sum(kv_rows.stop - kv_rows.start for kv_rows, _ in self._tiles)
            if self.peak.size * keys > _KEPT:
                return made
            self._kept = list(made)
        return iter(self._kept)

    def sum_rows(self) -> tuple[Array, Array]:
        """Compute `peak`, the largest score, `total`, the sum of exp(s - peak), and `moved`.

        `at_peak` holds what sdot, dP and dPdot are for the key of the largest score. `moved` is the
        mean of sdot less that, so that `lse_dot` is both together. `sink` is the sink's term of the
        sum. For a cotangent, return delta and deltadot without d lse, less what they would be if
        that key had all the weight. All are `(heads, rows, 1)`, the sums in float64.
        """
        # e, e x, e p, e x p and e pdot, with x, p and pdot less what they are at the peak.
        sums = np.zeros((5, *self.peak.shape))
        sums[0] = ~np.isneginf(self._sink)
        for tile in self.tiles():
            sums = self._from_new_peak(sums, tile)
            unscaled = tile.exp(self.peak).astype(np.float64)
            moved = unscaled * (tile.scores_dot - self.at_peak.scores_dot)
            sums[0] += unscaled.sum(axis=-1, keepdims=True)
            sums[1] += moved.sum(axis=-1, keepdims=True)
            if self.grad_out is not None:
                less, less_dot = tile.less_d_weights(self.at_peak)
                sums[2, ..., 0] += np.vecdot(unscaled, less)
                sums[3, ..., 0] += np.vecdot(moved, less)
                sums[4, ..., 0] += np.vecdot(unscaled, less_dot)
        self.sink = shares_of_sinks(self._sink, self.peak)
        self.total = sums[0]
        self.moved, d_mean, moved_d_mean, d_mean_dot = np.where(
            self.total == 0, 0, sums[1:] / self.total
        )
        return d_mean, moved_d_mean - self.moved * d_mean + d_mean_dot

    def _from_new_peak(self, sums: Array, tile: Tile) -> Array:
        """The sums if a tile has a larger score than any before it."""
        best = tile.scores.argmax(axis=-1, keepdims=True)
        found = np.take_along_axis(tile.scores, best, axis=-1)
        larger = found > self.peak
        peak, old = np.where(larger, found, self.peak), self.at_peak
        self.at_peak = Peak(
            *(
                np.where(larger, np.take_along_axis(of_tile, best, axis=-1), before)
                for of_tile, before in zip(tile.moving, old, strict=False)
            ),
            *old[len(tile.moving) :],
        )
        factor = np.where(peak == self.peak, 1, np.exp(self.peak - peak)).astype(np.float64)
        self.peak = peak
        total, moved, d_mean, moved_d_mean, d_mean_dot = sums * factor
        a, b, c = (x.astype(np.float64) - y for x, y in zip(old, self.at_peak, strict=True))
        new_d_mean = d_mean + b * total
        # (x + a) (p + b) = x p + a (p + b) + b x
        moved_d_mean = moved_d_mean + a * new_d_mean + b * moved
        rows = total, moved + a * total, new_d_mean, moved_d_mean, d_mean_dot + c * total
        return np.stack(rows)

    @property
    def lse_dot(self) -> Array:
        return self.at_peak.scores_dot + self.moved

    def weights(self, tile: Tile) -> tuple[Array, Array]:
        """w and its tangent."""
        weights = tile.select(tile.exp(self.peak) / self.total.astype(self.dtype))
        less = (tile.scores_dot - self.at_peak.scores_dot) - self.moved.astype(self.dtype)
        return weights, tile.select(weights * less)
