"""Scores of a tile, and the weighted sum of its values, from the definition.

The backends `blocked` and `reference`, replay and the trace use this code, so that they agree on
every score.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.language.evaluate import evaluate
from qkv.problem.language.expressions import SCORE, TRUE, Load, Node, Op, upwards
from qkv.problem.philox import dropout_factors
from qkv.problem.spec import Problem, Spec
from qkv.problem.stored_rows import Rows, plain, read_rows
from qkv.problem.tiles import TileGrid, TileKind

Array = NDArray[Any]


@dataclass(slots=True)
class Scores:
    """Scores of one problem in one floating type, tile by tile.

    Products of query and key are added in `product_dtype`, or else in `dtype`. Added in float64 and
    rounded once, a product does not depend on the tile in which it is computed.
    """

    problem: Problem
    dtype: np.dtype[Any]
    product_dtype: np.dtype[Any] | None = None
    score: Node = field(init=False)
    mask: Node = field(init=False)
    _cos_sin: dict[tuple[str, int], tuple[Array, Array]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.score = self.problem.spec.score
        self.mask = self.problem.spec.mask

    def grid(self, block_q: int, block_kv: int) -> TileGrid:
        spec = self.problem.spec
        return TileGrid(
            self.mask, self.problem.operands.tables, spec.q_len, spec.kv_len, block_q, block_kv
        )

    def query(self, batch: int, head: int, rows: Any) -> Array:
        """Rotated query rows."""
        index = np.unravel_index(batch, self.problem.spec.batch_shape)
        return self._rotated("q", batch, rows, self.problem.operands.query[(*index, head)][rows])

    def key(self, batch: int, head: int, rows: Any) -> Array:
        """Rotated key rows of the kv head that the query head reads."""
        key_rows = self._of_kv_head(self.problem.operands.key, batch, head, rows)
        return self._rotated("kv", batch, rows, key_rows)

    def value(self, batch: int, head: int, rows: Any) -> Array:
        return self._of_kv_head(self.problem.operands.value, batch, head, rows)

    def rows_of_all_heads(self) -> tuple[Array, Array, Array]:
        """Rotated queries, rotated keys and values, each `(batch_size * heads, rows, dim)`."""
        operands = self.problem.operands
        query, key, value = (
            array.reshape(self.problem.spec.batch_size, *array.shape[-3:])
            for array in (operands.query, plain(operands.key), plain(operands.value))
        )
        query, key = self._rotated_rows("q", query), self._rotated_rows("kv", key)
        value = value.astype(self.dtype, copy=False)
        return of_all_heads(query), of_all_heads(key), of_all_heads(value)

    def _rotated_rows(self, side: str, rows: Array) -> Array:
        if self.problem.operands.angles is None or not len(rows):
            return rows.astype(self.dtype, copy=False)
        return np.stack([self._rotated(side, b, slice(None), row) for b, row in enumerate(rows)])

    def _of_kv_head(self, stored: Rows, batch: int, head: int, rows: Any) -> Array:
        spec = self.problem.spec
        index = np.unravel_index(batch, spec.batch_shape)
        return read_rows(stored, index, head // spec.group_size, rows, self.dtype)

    def tile(
        self,
        batch: int,
        head: int,
        q_rows: slice | Array,
        kv_rows: slice | Array,
        kind: TileKind = TileKind.PARTIAL,
    ) -> Array:
        """Final scores `(queries, keys)`, -inf where a pair is forbidden.

        Rows are slices, read in place, or index arrays.
        """
        query, key = self.query(batch, head, q_rows), self.key(batch, head, kv_rows)
        wide = self.product_dtype or self.dtype
        with np.errstate(all="ignore"):
            products = query.astype(wide, copy=False) @ key.astype(wide, copy=False).T
            raw = products.astype(self.dtype, copy=False)
            raw = raw * self.dtype.type(self.problem.operands.scale)
        q_index, kv_index = (
            np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            for rows in (q_rows, kv_rows)
        )
        return self.finish(raw, batch, head, q_index[:, None], kv_index[None, :], kind)

    def pairs(self, batch: int, head: int, q_index: Array, kv_index: Array) -> Array:
        """Final scores of single pairs, given by two index arrays of one length."""
        query, key = self.query(batch, head, q_index), self.key(batch, head, kv_index)
        with np.errstate(all="ignore"):
            products = np.einsum("nd,nd->n", query, key, dtype=self.product_dtype or self.dtype)
            raw = products.astype(self.dtype, copy=False)
            raw = raw * self.dtype.type(self.problem.operands.scale)
            return self.finish(raw, batch, head, q_index, kv_index)

    def finish(
        self,
        raw: Array,
        batch: Any,
        head: Any,
        q_index: Any,
        kv_index: Any,
        kind: TileKind = TileKind.PARTIAL,
    ) -> Array:
        """Mods and mask on scaled products; all arguments broadcast with one another."""
        variables = {
            "score": raw,
            "batch": batch,
            "head": head,
            "q_index": q_index,
            "kv_index": kv_index,
        }
        tables = self.problem.operands.tables
        scores = raw
        if self.score != SCORE:
            scores = np.broadcast_to(
                np.asarray(evaluate(self.score, variables, tables, self.dtype), self.dtype),
                raw.shape,
            )
        if kind is TileKind.PARTIAL and self.mask != TRUE:
            allowed = evaluate(self.mask, variables, tables, self.dtype)
            scores = np.where(allowed, scores, self.dtype.type(-np.inf))
        return scores

    def factors(self, batch: Any, head: Any, q_index: Any, kv_index: Any) -> Array | None:
        """Dropout factors of the weights, or None."""
        dropout = self.problem.operands.dropout
        if dropout is None:
            return None
        return dropout_factors(dropout, batch, head, q_index, kv_index, self.dtype)

    def _rotated(self, side: str, batch: int, rows: Any, array: Array) -> Array:
        array = array.astype(self.dtype, copy=False)
        angles, rotation = self.problem.operands.angles, self.problem.spec.rotation
        if angles is None or rotation is None or rotation.rotary_dim == 0:
            return array
        row = batch if angles.rows(side) > 1 else 0
        if (side, row) not in self._cos_sin:
            self._cos_sin[side, row] = angles.cos_sin(side, row)
        cos, sin = (table[rows] for table in self._cos_sin[side, row])
        n = rotation.rotary_dim // 2
        if rotation.layout == "half_split":
            first, second = slice(0, n), slice(n, 2 * n)
        else:
            first, second = slice(0, 2 * n, 2), slice(1, 2 * n, 2)
        out = array.copy()
        # Computed in float64 and rounded once, so that a rotation loses no accuracy.
        a, b = array[..., first], array[..., second]
        with np.errstate(all="ignore"):
            out[..., first] = a * cos - b * sin
            out[..., second] = a * sin + b * cos
        return out


def pair_bytes(spec: Spec, dtype: np.dtype[Any]) -> int:
    """The most bytes that `tile` and `factors` hold for each pair.

    These are the product, before and after it is scaled, the scores and weights of the tile before,
    and what is computed of them: every step of an expression is kept until its end.
    """
    mask = 0 if spec.mask == TRUE else _steps_bytes(spec.mask, dtype) + dtype.itemsize
    moved = dtype.itemsize if spec.score != SCORE else 0
    dropped = DROPOUT_BYTES if spec.dropout else 0
    return 4 * dtype.itemsize + max(_steps_bytes(spec.score, dtype), mask + moved, dropped)


DROPOUT_BYTES = 80
"""What drawing a random number for a pair holds: ten integers of 64 bits."""


def _steps_bytes(root: Node, dtype: np.dtype[Any]) -> int:
    sizes = {"float": dtype.itemsize, "int": 8, "bool": 1}
    steps = [node for node in upwards(root, {}) if isinstance(node, Load | Op)]
    return sum(sizes[node.kind] for node in steps if _is_of_pairs(node.variables))


def _is_of_pairs(variables: frozenset[str]) -> bool:
    """Whether what reads these variables has a number for each pair, not for each row."""
    sides = ({"q_index", "q_pos"}, {"kv_index", "kv_pos"})
    return "score" in variables or all(not side.isdisjoint(variables) for side in sides)


def of_all_heads(array: Array) -> Array:
    """`(batch, heads, rows, dim)` as `(batch * heads, rows, dim)`."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def weighted_sum(weights: Array, scores: Array, value: Array) -> Array:
    """`weights @ value`, in which a forbidden pair (score -inf) contributes nothing at all.

    All may have a leading dimension, of one length.
    """
    # Some versions of NumPy add in another order for rows that are not adjacent in memory; what
    # `where` makes below is adjacent, so that hidden values would decide about the last bits.
    value = np.ascontiguousarray(value)
    finite = np.isfinite(value)
    with np.errstate(all="ignore"):
        if finite.all():
            return np.asarray(weights @ value)
        if value.ndim > 2:
            return np.stack(
                [weighted_sum(*one) for one in zip(weights, scores, value, strict=True)]
            )
        # 0 * NaN is NaN, so values that are not finite are added with `where` instead.
        total = weights @ np.where(finite, value, value.dtype.type(0))
        for j in np.flatnonzero(~finite.all(axis=1)):
            share = weights[:, j, None] * np.where(finite[j], value.dtype.type(0), value[j])
            total += np.where(np.isneginf(scores[:, j, None]), value.dtype.type(0), share)
    return np.asarray(total)
