"""The softmax of one row of one stretch of keys: scores become weights in place."""

from __future__ import annotations

import math

from llvmlite import ir

from qkv.backends.cpu.decode.layout import BLOCK_KV, STATE, DecodeKey
from qkv.backends.cpu.decode.rows import DecodeFrame
from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.emit.expressions.vector_code import Expressions, Neighbours
from qkv.backends.cpu.emit.forbidden_pairs import FORBIDDEN_WEIGHT
from qkv.problem.language.expressions import SCORE


class RowSoftmax:
    """Writes P = exp(S - m), with the row maximum m and the row sum of all stretches so far."""

    def __init__(self, frame: DecodeFrame, key: DecodeKey) -> None:
        self.frame, self.e = frame, frame.e
        self.statistics = key.statistics
        self.plain = frame.score == SCORE
        """Whether there are no score mods, so that scores are the scaled products."""
        self.may_forbid = key.spec.may_forbid

    def function(self, name: str, masked: bool) -> Value:
        """A function for one row of one stretch: S becomes P; row maximum and sum are updated.

        It returns whether a pair is forbidden, whose weight is then `FORBIDDEN_WEIGHT`.
        """
        e = self.e
        arguments = [*[POINTER] * 6, *[INT64] * 5]
        with e.function(name, arguments, BIT) as (function, args):
            arguments_, scores, state, rescale, key_scales, value_scales = args[:6]
            count, kv_start, batch, head, q_index = args[6:]
            b = e.builder
            row_max, row_sum, error, t_sum = (e.at(state, i * e.vector_bytes) for i in range(STATE))
            places = Expressions(
                e, self.frame.tables(arguments_),
                {"batch": batch, "head": head, "q_index": q_index}, self.frame.int_bits,
            )  # fmt: skip
            block_max = self._finish_scores(
                arguments_, places, scores, key_scales, count, kv_start, masked
            )
            old_max, block_max = e.load_vector(row_max), e.reduce(block_max, e.greatest)
            new_max = e.greatest(old_max, block_max)
            # A row that has seen no key has maximum -inf; shifted by it, -inf would become NaN.
            is_unseen = b.fcmp_ordered("==", new_max, e.const(-math.inf))
            shift = b.select(is_unseen, e.const(0.0), new_max)
            no_lanes = ir.Constant(ir.VectorType(BIT, e.lanes), None)

            def weigh_vector(k: Value, carried: list[Value]) -> list[Value]:
                place = e.at(scores, e.mul(k, e.real_bytes))
                score = e.load_vector(place)
                exponent = b.fsub(score, shift)
                is_forbidden = b.fcmp_ordered("==", score, e.const(-math.inf))
                weight = vector_math.exp_flushed(e, exponent)
                if self.may_forbid:
                    weight = b.select(is_forbidden, e.const(0.0), weight)
                total = b.fadd(carried[0], weight)
                lost = vector_math.error_of_sum(e, carried[0], weight, total)
                following = [total, b.fadd(carried[1], lost)]
                if self.statistics:
                    # T += weight * exponent, except where the weight is 0: 0 * -inf would be NaN.
                    added = e.fma(weight, exponent, carried[2])
                    adds = vector_math.exp_is_nonzero(e, exponent)
                    following.append(b.select(adds, added, carried[2]))
                if self.frame.is_quantised("value"):
                    weight = b.fmul(
                        weight, e.load_vector(e.at(value_scales, e.mul(k, e.real_bytes)))
                    )
                if self.frame.spec.dropout:
                    index = self._key_numbers(e.add(kv_start, k), e.add(kv_start, count))
                    weight = b.fmul(weight, self.frame.dropout_factor(arguments_, places, index))
                if self.may_forbid:
                    weight = b.select(is_forbidden, e.const(FORBIDDEN_WEIGHT), weight)
                    exists = e.first_lanes(e.sub(count, k))
                    following.append(b.or_(carried[-1], b.and_(is_forbidden, exists)))
                e.store_vector(weight, place)
                return following

            # The sum of the weights, what rounding took from it, and the sum for T.
            zeros = [e.const(0.0)] * (2 + self.statistics)

            def weigh_block(k: Value, carried: list[Value]) -> list[Value]:
                stop = e.least(e.add(k, BLOCK_KV), count)
                of_block = e.loop(k, stop, e.lanes, zeros + carried[len(zeros) :], weigh_vector)
                following = [*map(b.fadd, carried, of_block[: len(zeros)]), *of_block[len(zeros) :]]
                lost = vector_math.error_of_sum(e, carried[0], of_block[0], following[0])
                following[1] = b.fadd(following[1], lost)
                return following

            sums = e.loop(0, count, BLOCK_KV, zeros + [no_lanes] * self.may_forbid, weigh_block)
            max_change = b.fsub(old_max, shift)
            factor = vector_math.exp_flushed(e, max_change)
            e.store_vector(new_max, row_max)
            e.store_vector(factor, rescale)
            if self.statistics:
                # Before the first key the change is -inf, but 0 * -inf would be NaN.
                rebased = b.fmul(e.load_vector(row_sum), e.greatest(e.const(-1e4), max_change))
                old_t_sum = b.fmul(b.fadd(e.load_vector(t_sum), rebased), factor)
                e.store_vector(b.fadd(old_t_sum, sums[2]), t_sum)
            self._add_compensated(row_sum, error, factor, sums[0], sums[1])
            forbidden: Value = ir.Constant(BIT, 0)
            if self.may_forbid:
                forbidden = e.any_lane(sums[-1])
            b.ret(forbidden)
        return function

    def _add_compensated(
        self, row_sum: Value, error: Value, factor: Value, more: Value, lost: Value
    ) -> None:
        """row_sum = factor * row_sum + more + lost: a plain sum over many blocks drifts.

        `error` becomes what the row sum has too much.
        """
        e, b = self.e, self.e.builder
        old = b.fmul(e.load_vector(row_sum), factor)
        lost = b.fsub(lost, b.fmul(e.load_vector(error), factor))
        new = b.fadd(old, more)
        lost = b.fadd(lost, vector_math.error_of_sum(e, old, more, new))
        e.store_vector(new, row_sum)
        e.store_vector(b.fneg(lost), error)

    def _key_numbers(self, first: Value, stop: Value) -> Value:
        """Numbers of keys in the lanes, from `first` on; lanes from `stop` on repeat the last."""
        e, b = self.e, self.e.builder
        last = self.frame.lane_integers(e.sub(stop, 1))
        index = b.add(self.frame.lane_integers(first), self.frame.lane_numbers())
        return b.select(b.icmp_signed("<", index, last), index, last)

    def _finish_scores(
        self,
        arguments: Value,
        places: Expressions,
        scores: Value,
        key_scales: Value,
        count: Value,
        kv_start: Value,
        masked: bool,
    ) -> Value:
        """Apply scales of keys, score mods and mask in place; gives each lane's largest score."""
        e, b = self.e, self.e.builder
        scale = e.splat(self.frame.real_field(arguments, "scale"))
        stop = e.add(kv_start, count)

        def finish_vector(k: Value, carried: list[Value]) -> list[Value]:
            place = e.at(scores, e.mul(k, e.real_bytes))
            score = b.fmul(e.load_vector(place), scale)
            if self.frame.is_quantised("key"):
                score = b.fmul(score, e.load_vector(e.at(key_scales, e.mul(k, e.real_bytes))))
            first, left = e.add(kv_start, k), e.sub(count, k)
            beside = Neighbours(first, b.icmp_signed(">=", left, e.index(e.lanes)))
            inner = places.at_key(self._key_numbers(first, stop), score, beside)
            if not self.plain:
                score = inner.floats(self.frame.score)
            is_allowed = e.first_lanes(left)
            if masked:
                is_allowed = b.and_(is_allowed, inner.condition(self.frame.mask))
            score = b.select(is_allowed, score, e.const(-math.inf))
            e.store_vector(score, place)
            return [e.greatest(carried[0], score)]

        if not self.plain:
            places.hoist(self.frame.score)
        if masked:
            places.hoist(self.frame.mask)
        (largest,) = e.loop(0, count, e.lanes, [e.const(-math.inf)], finish_vector)
        return largest
