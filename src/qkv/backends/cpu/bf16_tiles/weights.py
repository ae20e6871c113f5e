"""Scores to weights of bfloat16, for 16 queries and two keys at a time.

A row of queries has a *shift*, at first the largest of the first scores that it sees:

    P[k, q] = exp(S[k, q] - shift[q]),   rounded to bfloat16
    l[q]    = sum_k exp(S[k, q] - shift[q]),   before rounding

A weight may therefore be larger than 1. A shift is raised, and what was added up is rescaled, only
where the weights of a group of keys add up to more than 2 to the power of `MOST_BITS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from qkv.backends.cpu.bf16_tiles.layout import Row
from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import Value
from qkv.backends.cpu.emit.forbidden_pairs import forbidden_weight
from qkv.backends.cpu.emit.transpose import transposed_values
from qkv.backends.cpu.emit.transposed_loads import transposed_loads
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.problem.language.expressions import TRUE

MOST_BITS = 16
"""The powers of two by which scores may exceed the shift of their row before it is raised."""


class Queries(NamedTuple):
    """The 16 queries of a unit and the keys of it, as the code of a unit knows them."""

    arguments: Value
    scores: Value
    """Scores of 32 keys, a vector of queries for each."""
    transposed: Value
    batch: Value
    head: Value
    first_row: Value
    kv_start: Value
    count: Value
    marked: Value
    """Whether forbidden pairs get the weight `FORBIDDEN_WEIGHT`, else 0."""


class Weights:
    """Emits the weights of one unit. Values that do not change from key to key are kept."""

    most_bits = MOST_BITS
    """The sum of a group of weights beyond which the shift is raised, as a power of two."""
    rounds = True
    """Whether weights are multiplied rounded to bfloat16."""

    def __init__(self, frame: ForwardFrame, at: Queries) -> None:
        self.frame, self.e, self.at = frame, frame.e, at
        e, b = frame.e, frame.e.builder
        self._places = frame.places(at.arguments, at.batch, at.head, at.first_row)
        self._scale = e.splat(frame.real_field(at.arguments, "scale"))
        # Differences of scores times this factor are powers of two.
        self.factor = e.const(vector_math.LOG2_E)
        if not self.is_scaled:
            self.factor = b.fmul(self._scale, self.factor)
        if not frame.plain:
            self._places.hoist(frame.score)
        if frame.mask != TRUE:
            self._places.hoist(frame.mask)
        self._forbidden = e.const(0.0)
        if frame.mask != TRUE or not frame.plain:
            self._forbidden = forbidden_weight(e, at.marked)
        self._loads = transposed_loads(frame.spec)
        self._block_kv = frame.block_kv
        self.parts = [Row.GROUP_SUM] + [Row.GROUP_OUT] * self.rounds
        if frame.statistics:
            self.parts.append(Row.GROUP_T)
        self.no_sums = [e.const(0.0)] * len(self.parts)
        if frame.statistics:
            self.no_sums.append(e.const(-math.inf))

    @property
    def is_scaled(self) -> bool:
        """Whether `score` gives scores times scale."""
        return not self.frame.plain

    def power_of_two(self, x: Value) -> Value:
        """2^x, as weights are computed."""
        return vector_math.exp2_floored(self.e, x)

    def score(self, place: Value, k: Value, *, checked: bool) -> Value:
        """The score of key k, -inf where it is forbidden; scaled if `is_scaled`.

        Without `checked`, no pair is forbidden by the mask, and all keys exist.
        """
        frame, e, b = self.frame, self.e, self.e.builder
        score, exists = e.load_vector(place), None
        masked = checked and frame.mask != TRUE
        if self.is_scaled:
            score = b.fmul(score, self._scale)
        if masked or not frame.plain:
            # A key that does not exist has no entries in tables: the last one's are read.
            own = e.least(k, e.sub(self.at.count, 1)) if checked else k
            inner = self._places.at_key(e.add(self.at.kv_start, own), score)
            source = self.at.transposed
            inner.known.update(
                transposed_values(e, frame.spec, self._loads, source, own, self._block_kv)
            )
            if not frame.plain:
                score = inner.floats(frame.score)
            if masked:
                exists = inner.condition(frame.mask)
        if checked:
            is_key = e.splat(e.below(k, self.at.count))
            exists = is_key if exists is None else b.and_(is_key, exists)
            score = b.select(exists, score, e.const(-math.inf))
        return score

    def weigh(
        self, score: Value, k: Value, shift: Value, sums: list[Value], *, checked: bool
    ) -> tuple[Value, list[Value]]:
        """The weight of key k, as bits of float32, rounded if it `rounds`, and the sums with it.

        The sums are of `parts`, and for statistics the largest score.
        """
        frame, e, b = self.frame, self.e, self.e.builder
        difference = b.fsub(score, shift)
        power = b.fmul(difference, self.factor)
        weight = self.power_of_two(power)
        if checked or not frame.plain:
            # Not left to the exponential: -inf times a scale of 0 would be NaN.
            is_forbidden = b.fcmp_ordered("==", score, e.const(-math.inf))
            weight = b.select(is_forbidden, self._forbidden, weight)
        bits = self._multiplied(weight)
        added = [weight, e.as_floats(bits)] if self.rounds else [weight]
        following = [e.settled(b.fadd(total, x)) for total, x in zip(sums, added, strict=False)]
        if frame.statistics:
            # T += weight * exponent, except where the weight is 0: 0 * -inf would be NaN.
            exponent, t_sum = b.fmul(power, e.const(vector_math.LN_2)), sums[-2]
            is_zero = b.fcmp_ordered("==", weight, e.const(0.0))
            following.append(b.select(is_zero, t_sum, e.fma(weight, exponent, t_sum)))
            following.append(e.greatest(sums[-1], score))
        if frame.spec.dropout:
            key = e.add(self.at.kv_start, k)
            factor = frame.dropout_factor(self.at.arguments, self._places, key)
            bits = self._multiplied(b.fmul(weight, factor))
        return bits, following

    def _multiplied(self, weight: Value) -> Value:
        """The bits of the weight with which values are multiplied."""
        return self._rounded(weight) if self.rounds else self.e.as_bits(weight)

    def _rounded(self, weight: Value) -> Value:
        """A weight rounded to bfloat16, to nearest."""
        e, b = self.e, self.e.builder
        return b.and_(b.add(e.as_bits(weight), e.const_bits(0x8000)), e.const_bits(-(2**16)))

    def weigh_pair(
        self,
        places: Sequence[Value],
        k: Value,
        shift: Value,
        sums: list[list[Value]],
        target: Value,
        *,
        checked: bool,
        finished: bool,
    ) -> list[list[Value]]:
        """Store the weights of keys k and k + 1 as one row of a tile.

        `sums` are two lists, one for each key of the pair. Scores at `places` are as `score` gives
        them if they are `finished`.
        """
        e = self.e
        bits, following = [], []
        for i, (here, own) in enumerate(zip(places, sums, strict=True)):
            key = e.add(k, i)
            score = e.load_vector(here) if finished else self.score(here, key, checked=checked)
            weight, after = self.weigh(score, key, shift, own, checked=checked)
            bits.append(weight)
            following.append(after)
        self._store_pair(bits, target)
        return following

    def _store_pair(self, bits: Sequence[Value], target: Value) -> None:
        """Store the weights of two keys, given as bits."""
        e, b = self.e, self.e.builder
        pair = b.or_(bits[1], e.settled(b.lshr(bits[0], e.const_bits(16))))
        e.store_vector(e.as_floats(pair), target)
