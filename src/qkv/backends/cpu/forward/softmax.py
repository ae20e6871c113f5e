"""Weights from scores: score mods, masks, and the online softmax of one vector of queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import Emitter, Value
from qkv.backends.cpu.emit.expressions.vector_code import Expressions
from qkv.backends.cpu.emit.forbidden_pairs import forbidden_weight
from qkv.backends.cpu.emit.transpose import transpose_tables, transposed_values
from qkv.backends.cpu.emit.transposed_loads import transposed_loads
from qkv.backends.cpu.forward.frame import ForwardFrame, ScoreVector
from qkv.backends.cpu.forward.layout import StatsRow
from qkv.problem.language.expressions import walk

_SUM = 16
"""Number of weights that are added in one chain: rounding errors grow with its length."""

WeightOfKey: TypeAlias = Callable[[Value, list[Value]], tuple[Value, list[Value]]]
"""`weight_of_key(k, sums)` gives the weight of key k, and the sums after it was added."""
StoreWeights: TypeAlias = Callable[..., list[Value]]
"""A function of the arguments of `store_weights`."""


class RowSums:
    """Updates row maximum and row sum of one vector of queries with one block of keys.

    `largest` is each query's largest score in the block.
    """

    def __init__(
        self, e: Emitter, stats: Value, width: Value, largest: Value, *, statistics: bool
    ) -> None:
        b = e.builder
        self._e, self._statistics = e, statistics
        self._at = [e.at(stats, e.mul(width, row)) for row in StatsRow]
        self._old_max = e.load_vector(self._at[StatsRow.ROW_MAX])
        self._new_max = e.greatest(self._old_max, largest)
        # A row that has seen no key has maximum -inf; shifted by it, -inf would become NaN.
        unseen = b.fcmp_ordered("==", self._new_max, e.const(-math.inf))
        self._shift = b.select(unseen, e.const(0.0), self._new_max)
        self.zero_sums = [e.const(0.0)] * (1 + statistics)
        """The sums before the first key."""

    def weigh_key(
        self, score: Value, sums: list[Value], forbidden: Value | None
    ) -> tuple[Value, list[Value]]:
        """The weight of one key, and the sums with it; a score of -inf has weight `forbidden`."""
        e, b = self._e, self._e.builder
        exponent = b.fsub(score, self._shift)
        weight = vector_math.exp_flushed(e, exponent)
        if forbidden is not None:
            is_forbidden = b.fcmp_ordered("==", score, e.const(-math.inf))
            weight = b.select(is_forbidden, forbidden, weight)
        following = [b.fadd(sums[0], weight)]
        if self._statistics:
            # T += weight * exponent, except where the weight is 0: 0 * -inf would be NaN.
            added = e.fma(weight, exponent, sums[1])
            following.append(b.select(vector_math.exp_is_nonzero(e, exponent), added, sums[1]))
        if len(sums) > len(self.zero_sums):
            rest = vector_math.error_of_sum(e, sums[0], weight, following[0])
            following.append(b.fadd(sums[-1], rest))
        return weight, following

    def advance(self, sums: list[Value], rest: Value | None = None) -> None:
        """Store row maximum, row sum, T, and the factor by which the output is to be rescaled.

        `rest` is the rounding error of the block's sum, where it is known.
        """
        e, b = self._e, self._e.builder
        row_max, row_sum, rescale, sum_error, _, t_sum = self._at
        max_change = b.fsub(self._old_max, self._shift)
        factor = vector_math.exp_flushed(e, max_change)
        e.store_vector(self._new_max, row_max)
        if self._statistics:
            # Before the first key the change is -inf, but 0 * -inf would be NaN.
            rebased = b.fmul(e.load_vector(row_sum), e.greatest(e.const(-1e4), max_change))
            old_t_sum = b.fmul(b.fadd(e.load_vector(t_sum), rebased), factor)
            e.store_vector(b.fadd(old_t_sum, sums[1]), t_sum)
        # Compensated (Kahan 1965): rounding errors of a plain sum grow with the number of blocks.
        old_sum = b.fmul(e.load_vector(row_sum), factor)
        total = b.fsub(sums[0], b.fmul(e.load_vector(sum_error), factor))
        new_sum = b.fadd(old_sum, total)
        e.store_vector(new_sum, row_sum)
        error_here = b.fsub(b.fsub(new_sum, old_sum), total)
        e.store_vector(error_here if rest is None else b.fsub(error_here, rest), sum_error)
        e.store_vector(factor, rescale)


def softmax_function(frame: ForwardFrame, name: str, masked: bool) -> Value:
    """A function of `ScoreVector`: S becomes P; row maximum and row sum are updated."""
    e = frame.e
    with frame.vector_function(name) as (function, at):
        places = frame.places_at(at)
        scale = e.splat(frame.real_field(at.arguments, "scale"))
        finished = masked or not frame.plain
        if finished:
            largest = finish_scores(frame, at, places, scale, masked)
        else:
            largest = e.load_vector(e.at(at.stats, e.mul(at.width, StatsRow.BLOCK_MAX)))
        scores_to_weights(frame, at, places, largest, store_weights, finished=finished)
    return function


def scores_to_weights(
    frame: ForwardFrame,
    at: ScoreVector,
    places: Expressions,
    largest: Value,
    store: StoreWeights,
    *,
    finished: bool,
) -> None:
    """S becomes P. If S is not `finished`, it is still to be scaled, and no pair is forbidden."""
    e, b = frame.e, frame.e.builder
    scale = forbidden = None
    if finished:
        forbidden = forbidden_weight(e, at.marked)
    else:
        scale = e.splat(frame.real_field(at.arguments, "scale"))
        largest = b.fmul(largest, scale)
    row = RowSums(e, at.stats, at.width, largest, statistics=frame.statistics)

    def weight_of_key(k: Value, carried: list[Value]) -> tuple[Value, list[Value]]:
        score = e.load_vector(e.at(at.scores, e.mul(k, at.width)))
        if scale is not None:
            score = b.fmul(score, scale)
        weight, following = row.weigh_key(score, carried, forbidden)
        if frame.spec.dropout:
            factor = frame.dropout_factor(at.arguments, places, e.add(at.kv_start, k))
            weight = b.fmul(weight, factor)
        return weight, following

    def add_group(k: Value, carried: list[Value]) -> list[Value]:
        # Sums of sums: rounding errors grow with the length of a chain.
        end = e.least(e.add(k, _SUM), at.count)
        sums = store(e, at.scores, at.width, k, end, row.zero_sums, weight_of_key)
        return [b.fadd(old, part) for old, part in zip(carried, sums, strict=True)]

    # If all keys are one group, the rounding error of its sum is known: `store` adds it up too.
    only_group = b.select(e.below(at.count, _SUM + 1), at.count, e.index(0))
    sums = [*row.zero_sums, e.const(0.0)]
    *sums, rest = store(
        e, at.scores, at.width, e.index(0), only_group, sums, weight_of_key, short=True
    )
    row.advance(e.loop(only_group, at.count, _SUM, sums, add_group), rest)


def store_weights(
    e: Emitter,
    scores: Value,
    width: Value,
    start: Value,
    stop: Value,
    sums: list[Value],
    weight_of_key: WeightOfKey,
    *,
    short: bool = False,
) -> list[Value]:
    """Overwrite the scores of keys from `start` on with weights; gives the sums.

    `short` says that there are few keys, so that unrolled loops do not pay.
    """

    def store_key(k: Value, sums: list[Value]) -> list[Value]:
        weight, sums = weight_of_key(k, sums)
        e.store_vector(weight, e.at(scores, e.mul(k, width)))
        return sums

    return e.loop(start, stop, 1, sums, store_key)


def finish_scores(
    frame: ForwardFrame, at: ScoreVector, places: Expressions, scale: Value, masked: bool
) -> Value:
    """Apply scale, score mods and mask to S in place; gives each query's largest score."""
    e = frame.e
    finish_key = finish_key_function(frame, at, places, scale, masked)
    (largest,) = e.loop(0, at.count, 1, [e.const(-math.inf)], finish_key)
    return largest


def finish_key_function(
    frame: ForwardFrame, at: ScoreVector, places: Expressions, scale: Value, masked: bool
) -> Callable[[Value, list[Value]], list[Value]]:
    """`finish_key(k, [largest])` finishes the scores of one key and gives the largest so far."""
    e, b, spec, block_kv = frame.e, frame.e.builder, frame.spec, frame.block_kv
    loads = transposed_loads(spec)
    if not masked:
        read = set(walk(frame.score))
        loads = tuple(load for load in loads if load in read)
    transpose_tables(e, places, loads, at.kv_start, at.count, block_kv, at.transposed)

    def finish_key(k: Value, carried: list[Value]) -> list[Value]:
        place = e.at(at.scores, e.mul(k, at.width))
        score = b.fmul(e.load_vector(place), scale)
        inner = places.at_key(e.add(at.kv_start, k), score)
        inner.known.update(transposed_values(e, spec, loads, at.transposed, k, block_kv))
        if not frame.plain:
            score = inner.floats(frame.score)
        if masked:
            score = b.select(inner.condition(frame.mask), score, e.const(-math.inf))
        e.store_vector(score, place)
        return [e.greatest(carried[0], score)]

    if not frame.plain:
        places.hoist(frame.score)
    if masked:
        places.hoist(frame.mask)
    return finish_key
