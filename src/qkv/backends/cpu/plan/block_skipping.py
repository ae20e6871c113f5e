"""Blocks in which every weight is exactly 0 are found before their scores are computed.

A bias that falls with distance, as of ALiBi, leaves most pairs of a long input without any weight.
By the inequality of Cauchy and Schwarz a scaled product is at most

    B = scale * |Q[q, :]| * |K[k, :]|

so a score `f(product) + bias` lies inside the bounds of f over [-B, B] and of the bias over a
block, and the maximum of a row is not below the lower bound of a block that the row sees whole.
Where the upper bound of a block is so far below that the kernels' exponential is exactly 0, its
weights are, and what is finite adds nothing times 0: the block need not be read, forward or
backward. Norms cost O(n d), bounds some operations for each block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.plan.schedule import TableContents, arrays_of, table_contents
from qkv.problem.backward import BackwardInputs
from qkv.problem.language.bounds import bound
from qkv.problem.language.expressions import Node, Op, constant, operation
from qkv.problem.language.intervals import Interval
from qkv.problem.spec import Problem
from qkv.problem.tiles import TileKind

Array = NDArray[Any]

_POSITIONS = {"q_index", "kv_index"}
_LEAST_OPERATIONS = 5e8
"""Operations of one head from which on finding blocks to skip is worthwhile."""
_LEAST_SHARE = 1 / 8
"""The least share of a head that must have no weight if all products were 0; with less, looking is
not worthwhile."""
_SAMPLED_BLOCKS = 64
"""Number of blocks in each direction with which this share is estimated."""
_ROUNDING = 2.0**-8
"""Relative to B, more than the rounding error of a product of any length in float32."""
_UNDERFLOW = 1e-36
"""More than a sum of squares loses to numbers that are too small for float32."""
_LARGE = 1e37
"""A number somewhat below the largest float32."""
_ROWS_AT_ONCE = 2**12
"""Number of rows whose squares are added at once."""
_KEPT_BLOCKS = 2**14
"""Bounds of up to this many blocks (256 KiB) are cached. For more blocks, bounding costs little
beside the pass itself."""


@dataclass(frozen=True, slots=True)
class _FallingBias:
    """Scores that are a function of the product plus a bias that falls, and in which heads."""

    product: Node
    bias: Node
    contents: TableContents
    heads: tuple[bool, ...]


def skips_by_value(problem: Problem) -> bool:
    """Whether which pairs are computed depends on values of query, key and value."""
    return _falling_bias(problem) is not None


def block_skipping(
    problem: Problem, block_q: int, block_kv: int, inputs: BackwardInputs | None = None
) -> BlockSkipping | None:
    """A filter for the blocks of a problem or of its gradients; None if none can be skipped."""
    falling = _falling_bias(problem)
    return None if falling is None else BlockSkipping(problem, (block_q, block_kv), falling, inputs)


class BlockSkipping:
    """Finds the blocks of keys of one problem that need not be computed; made by `block_skipping`.

    Only blocks that a kernel processes as a whole are skipped: without a part of one, the rest
    would be added up in another order, and the bits of a row would depend on what it may not see.
    """

    def __init__(
        self,
        problem: Problem,
        block: tuple[int, int],
        falling: _FallingBias,
        inputs: BackwardInputs | None,
    ) -> None:
        self._problem, self._block, self._falling_bias = problem, block, falling
        self._inputs = inputs
        self._group: tuple[int, int, Array, Array] | None = None

    def skip(self, kinds: Array, tile_kv: int, batch: int, head: int, first: int) -> Array:
        """`TileKind` of query blocks from `first` on, where blocks that weigh nothing are empty."""
        if not self._falling_bias.heads[head]:
            return kinds
        spec, (block_q, block_kv) = self._problem.spec, self._block
        where = (*np.unravel_index(batch, spec.batch_shape), head)
        begin, end = first * block_q, (first + len(kinds)) * block_q
        keys, values = self._key_norms(batch, head // spec.group_size)
        queries = self._row_norms(self._problem.operands.query, where, begin, end)
        low, high = self._score_bounds(queries, keys, head, first)

        tiles = block_kv // tile_kv
        full = np.zeros((len(kinds), len(keys) * tiles), bool)
        full[:, : kinds.shape[1]] = kinds == TileKind.FULL
        whole = np.logical_and.reduce([full[:, n::tiles] for n in range(tiles)])
        seen = np.where(whole, low, -np.inf)
        skippable = whole & _weighs_nothing(seen, high, _least_gap(spec.compute_dtype))
        skippable &= self._is_finite(values, where, begin, end)
        # Kernels count blocks of keys from the start of a run: only such blocks are skipped.
        after = np.where(full, 0, np.arange(1, full.shape[1] + 1))
        skippable &= np.maximum.accumulate(after, axis=1)[:, ::tiles] % tiles == 0
        skipped = np.repeat(skippable, tiles, axis=1)[:, : kinds.shape[1]]
        return np.where(skipped, TileKind.EMPTY, kinds)

    def _score_bounds(
        self, queries: Array, keys: Array, head: int, first: int
    ) -> tuple[Array, Array]:
        """The lowest and the highest score of each block, given norms.

        A block with products that may not be finite has no bounds.
        """
        spec, operands, falling = self._problem.spec, self._problem.operands, self._falling_bias
        with np.errstate(all="ignore"):
            most = abs(operands.scale) * (1 + _ROUNDING) * queries[:, None] * keys
        known = np.isfinite(most)
        most = np.where(known, most, np.inf)
        places = {"score": Interval(-most, most), "head": Interval.of(head, head)}
        product = bound(falling.product, places, operands.tables)
        sizes = (spec.q_len, spec.kv_len, *self._block, first, *most.shape)
        bias_bounds = _bias_bounds if most.size <= _KEPT_BLOCKS else _bias_bounds.__wrapped__
        low, high = bias_bounds(falling.bias, falling.contents, head, *sizes)
        known &= ~np.asarray(product.nan)
        with np.errstate(invalid="ignore"):
            low, high = product.low + low, product.high + high
        return np.where(known, low, -np.inf), np.where(known, high, np.inf)

    def _is_finite(self, values: Array, where: tuple[Any, ...], begin: int, end: int) -> Array:
        """Whether everything that the weights of each block are multiplied with is finite.

        That is V, and for gradients dO and `dO . V - dO . O + d lse`; 0 * inf would be NaN.
        """
        if self._inputs is None:
            return np.isfinite(values)
        inputs = self._inputs
        grad_out, out, grad_lse = (
            self._row_norms(array, where, begin, end)[:, None]
            for array in (inputs.grad_out, inputs.out, inputs.grad_lse[..., None])
        )
        with np.errstate(all="ignore"):
            return np.asarray(grad_out * (1 + values + out) + grad_lse < _LARGE)

    def _row_norms(self, array: Array, where: tuple[Any, ...], begin: int, end: int) -> Array:
        return _largest_norms(array[where][begin:end], self._block[0])

    def _key_norms(self, batch: int, kv_head: int) -> tuple[Array, Array]:
        """The largest norms of each block of K and of V."""
        if self._group is None or self._group[:2] != (batch, kv_head):
            operands = self._problem.operands
            place = np.unravel_index(batch, self._problem.spec.batch_shape)
            where: tuple[Any, ...] = (*place, kv_head)
            rows = (np.asarray(operands.key)[where], np.asarray(operands.value)[where])
            key, value = (_largest_norms(each, self._block[1]) for each in rows)
            self._group = batch, kv_head, key, value
        return self._group[2:]


def _falling_bias(problem: Problem) -> _FallingBias | None:
    spec = problem.spec
    if 2.0 * (spec.head_dim + spec.v_head_dim) * spec.q_len * spec.kv_len < _LEAST_OPERATIONS:
        return None
    parts = None if spec.rotation is not None else _product_and_bias(spec.score)
    contents = None if parts is None else table_contents(parts[1], problem.operands.tables)
    if parts is None or contents is None:
        return None
    sizes = (spec.num_heads, spec.q_len, spec.kv_len)
    heads = _heads_with_falling_bias(parts[1], contents, *sizes, _least_gap(spec.compute_dtype))
    return _FallingBias(*parts, contents, heads) if any(heads) else None


@lru_cache(maxsize=256)
def _product_and_bias(score: Node) -> tuple[Node, Node] | None:
    """Split a score into f(product) and a bias of heads and positions; None if it cannot be."""
    bias: Node = constant(0.0)
    while isinstance(score, Op) and score.name in ("add", "sub"):
        left, right = score.args
        if "score" not in right.variables:
            bias = operation(score.name, bias, right)
            score = left
        elif score.name == "add" and "score" not in left.variables:
            bias = operation("add", bias, left)
            score = right
        else:
            break
    if score.variables - {"score", "head"} or not bias.variables & _POSITIONS:
        return None
    return None if "batch" in bias.variables else (score, bias)


@lru_cache(maxsize=64)
def _heads_with_falling_bias(
    bias: Node, contents: TableContents, heads: int, q_len: int, kv_len: int, least_gap: float
) -> tuple[bool, ...]:
    """Whether each head has many blocks that would weigh nothing if every product were 0.

    At least a share `_LEAST_SHARE` of its blocks is many.
    """
    block_q, block_kv = -(-q_len // _SAMPLED_BLOCKS), -(-kv_len // _SAMPLED_BLOCKS)
    sizes = (q_len, kv_len, block_q, block_kv, 0, -(-q_len // block_q), -(-kv_len // block_kv))
    bounds = (_bias_bounds.__wrapped__(bias, contents, head, *sizes) for head in range(heads))
    return tuple(bool(_weighs_nothing(*each, least_gap).mean() >= _LEAST_SHARE) for each in bounds)


@lru_cache(maxsize=32)
def _bias_bounds(
    bias: Node,
    contents: TableContents,
    head: int,
    q_len: int,
    kv_len: int,
    block_q: int,
    block_kv: int,
    first: int,
    rows: int,
    columns: int,
) -> tuple[Array, Array]:
    """The lowest and the highest bias of each block, with room for adding it in float32."""
    q_start = np.arange(first, first + rows)[:, None] * block_q
    kv_start = np.arange(columns)[None, :] * block_kv
    places = {
        "q_index": Interval(q_start, np.minimum(q_start + block_q, q_len) - 1),
        "kv_index": Interval(kv_start, np.minimum(kv_start + block_kv, kv_len) - 1),
        "head": Interval.of(head, head),
    }
    interval = bound(bias, places, arrays_of(contents))
    known = np.broadcast_to(~np.asarray(interval.nan), (rows, columns))
    room = _ROUNDING * np.maximum(np.abs(interval.low), np.abs(interval.high))
    with np.errstate(invalid="ignore"):
        low, high = interval.low - room, interval.high + room
    return np.where(known, low, -np.inf), np.where(known, high, np.inf)


def _weighs_nothing(low: Array, high: Array, least_gap: float) -> Array:
    """Which blocks have no score near the highest lower bound of their row: their weights are 0."""
    return np.asarray(high < low.max(axis=1, keepdims=True) + least_gap)


def _least_gap(dtype: np.dtype[Any]) -> float:
    """A difference of scores, with some margin, below which weights of this type are exactly 0."""
    return math.log(float(np.finfo(dtype).smallest_normal)) - 1.0


def _largest_norms(rows: Array, block: int) -> Array:
    """The largest norm in each block of rows, as float64; not finite where an element is not."""
    squares = np.empty(len(rows), np.float64)
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE]
            if part.dtype.itemsize < 4:
                part = part.astype(np.float32)
            squares[start : start + _ROWS_AT_ONCE] = np.einsum("ij,ij->i", part, part)
        return np.sqrt(np.maximum.reduceat(squares, np.arange(0, len(rows), block)) + _UNDERFLOW)
