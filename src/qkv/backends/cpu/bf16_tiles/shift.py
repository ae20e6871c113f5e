"""The shifts and sums of 16 queries, and the weights of groups of 32 keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from qkv.backends.cpu.bf16_tiles.layout import GROUP, Row
from qkv.backends.cpu.bf16_tiles.weights import Weights
from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import Emitter, Value
from qkv.backends.cpu.products.layout import TILE_BYTES

PAIRS = GROUP // 2


def if_any(e: Emitter, lanes: Value, body: Callable[[], object]) -> None:
    """Code for the rare case that a condition holds in a lane."""
    with e.builder.if_then(e.any_lane(lanes), likely=False):
        body()


class ShiftedRows:
    """Emits what 16 queries keep: shifts and sums, in rows of statistics `width` bytes apart.

    Scores of neighbouring keys, and pairs of weights, are as far apart.
    """

    def __init__(self, weights: Weights, stats: Value, width: int = TILE_BYTES) -> None:
        self.weights, self.stats, self.width = weights, stats, width
        self.frame, self.e = weights.frame, weights.e

    def stat(self, name: Row) -> Value:
        return self.e.at(self.stats, name * self.width)

    def shift(self, largest_of: Callable[[], Value]) -> Value:
        """What is subtracted from the scores of a group.

        Rows that see their first keys take the largest score of this group.
        """
        b = self.e.builder

        def take_largest() -> None:
            largest = largest_of()
            self._store_shift(b.select(self._is_unseen(), largest, self._shift_row()))

        if_any(self.e, self._is_unseen(), take_largest)
        return self.shift_now()

    def shift_now(self) -> Value:
        """The shift; 0 for rows that have seen no key."""
        return self.e.builder.select(self._is_unseen(), self.e.const(0.0), self._shift_row())

    def _shift_row(self) -> Value:
        return self.e.load_vector(self.stat(Row.SHIFT))

    def _is_unseen(self) -> Value:
        return self.e.builder.fcmp_ordered("==", self._shift_row(), self.e.const(-math.inf))

    def _store_shift(self, shift: Value) -> None:
        e, b = self.e, self.e.builder
        e.store_vector(shift, self.stat(Row.SHIFT))
        if not self.weights.is_scaled:
            scale = e.splat(self.frame.real_field(self.weights.at.arguments, "scale"))
            # A scale of 0 times -inf would be NaN.
            unseen = b.fcmp_ordered("==", shift, e.const(-math.inf))
            shift = b.select(unseen, shift, b.fmul(shift, scale))
        e.store_vector(shift, self.stat(Row.ROW_MAX))

    def too_large(self) -> Value:
        """Rows in which the sum of a group says that the shift is too small."""
        e = self.e
        limit = e.const(2.0**self.weights.most_bits)
        return e.builder.fcmp_ordered(">", e.load_vector(self.stat(Row.GROUP_SUM)), limit)

    def raise_shift(self, too_large: Value, largest: Value) -> Value:
        """Make the `largest` of new scores the shift of rows that are too large.

        Their sums are rescaled. Gives the factor by which O is to be rescaled, 1 for other rows.
        """
        e, b = self.e, self.e.builder
        old = self._shift_row()
        new = b.select(too_large, e.greatest(old, largest), old)
        # A row that has seen no key has the shift -inf, whose difference would be NaN.
        change = b.fmul(b.fsub(old, new), self.weights.factor)
        change = b.select(too_large, change, e.const(0.0))
        factor = self.weights.power_of_two(change)
        if self.frame.statistics:
            row_sum, t_sum = (e.load_vector(self.stat(n)) for n in (Row.ROW_SUM, Row.T_SUM))
            natural = b.fmul(change, e.const(vector_math.LN_2))
            e.store_vector(e.fma(row_sum, natural, t_sum), self.stat(Row.T_SUM))
        for name in (Row.ROW_SUM, Row.SUM_ERROR, Row.T_SUM, Row.OUT_SUM):
            e.scale_vector(self.stat(name), factor)
        self._store_shift(new)
        return factor

    def largest_of(
        self,
        scores: Value,
        first: Value,
        seen: Value,
        *,
        checked: bool = True,
        keep: bool = False,
    ) -> Value:
        """The largest score of the group from key `first` on, or `seen` where that is larger.

        To `keep` finished scores, they are stored, those of keys that do not exist too.
        """
        e = self.e

        def compare_key(k: Value, carried: list[Value]) -> list[Value]:
            place = e.at(scores, e.mul(k, self.width))
            score = self.weights.score(place, e.add(first, k), checked=checked)
            if keep:
                e.store_vector(score, place)
            return [e.greatest(carried[0], score)]

        stop = e.index(GROUP) if keep else e.least(GROUP, e.sub(self.weights.at.count, first))
        (largest,) = e.loop(0, stop, 1, [seen], compare_key)
        return largest


class Group:
    """The weights of one group of keys, while code for them is written."""

    def __init__(
        self,
        rows: ShiftedRows,
        scores: Value,
        target: Value,
        first: Value,
        *,
        checked: bool,
        finished: bool = False,
    ) -> None:
        self.rows, self.e, self.weights = rows, rows.e, rows.weights
        self.scores, self.target, self.first = scores, target, first
        self.checked, self.finished = checked, finished

    def no_sums(self) -> list[list[Value]]:
        """Sums of even and of odd keys, before the first."""
        return [list(self.weights.no_sums) for _ in range(2)]

    def weigh(self, p: Value, shift: Value, sums: list[list[Value]]) -> list[list[Value]]:
        """Weigh keys 2p and 2p + 1; gives the sums with them."""
        e, width = self.e, self.rows.width
        places = [e.at(self.scores, e.mul(p, 2 * width), i * width) for i in range(2)]
        key, row = e.add(self.first, e.mul(p, 2)), e.at(self.target, e.mul(p, width))
        return self.weights.weigh_pair(
            places, key, shift, sums, row, checked=self.checked, finished=self.finished
        )

    def weigh_in_loop(self, shift: Value) -> None:
        """Weigh all keys, and store their sums."""
        half = len(self.weights.no_sums)

        def weigh_next(p: Value, carried: list[Value]) -> list[Value]:
            sums = self.weigh(p, shift, [carried[:half], carried[half:]])
            return [x for own in sums for x in own]

        flat = self.e.loop(0, PAIRS, 1, [x for own in self.no_sums() for x in own], weigh_next)
        self.store_sums([flat[:half], flat[half:]])

    def store_sums(self, sums: Sequence[Sequence[Value]]) -> None:
        """Store the sums of this group."""
        e, rows = self.e, self.rows
        first, second = sums
        for name, x, y in zip(self.weights.parts, first, second, strict=False):
            e.store_vector(e.builder.fadd(x, y), rows.stat(name))
        if rows.frame.statistics:
            place = rows.stat(Row.LARGEST)
            largest = e.greatest(e.greatest(first[-1], second[-1]), e.load_vector(place))
            e.store_vector(largest, place)

    def add_sums(self) -> None:
        """Add the sums of this group to those of the rows; compensated (Kahan 1965)."""
        e, b, rows = self.e, self.e.builder, self.rows
        names = Row.ROW_SUM, Row.SUM_ERROR, Row.GROUP_SUM
        row_sum, error, own = (e.load_vector(rows.stat(name)) for name in names)
        added = b.fsub(own, error)
        total = b.fadd(row_sum, added)
        e.store_vector(total, rows.stat(Row.ROW_SUM))
        e.store_vector(b.fsub(b.fsub(total, row_sum), added), rows.stat(Row.SUM_ERROR))
        for sum_, part in ((Row.OUT_SUM, Row.GROUP_OUT), (Row.T_SUM, Row.GROUP_T)):
            if part in self.weights.parts:
                vectors = (e.load_vector(rows.stat(name)) for name in (sum_, part))
                e.store_vector(b.fadd(*vectors), rows.stat(sum_))
