"""The records of all tasks of a kv head, merged row by row into the output."""

from __future__ import annotations

import math

from llvmlite import ir

from qkv.backends.cpu.decode.layout import STATE, DecodeKey
from qkv.backends.cpu.decode.rows import DecodeFrame
from qkv.backends.cpu.emit import storage, vector_math
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Value


class RecordMerge:
    """Writes the merge of one row."""

    def __init__(self, frame: DecodeFrame, key: DecodeKey) -> None:
        self.frame, self.e = frame, frame.e
        self.out_dtype, self.statistics = key.out_dtype, key.statistics

    def function(self) -> Value:
        """A function `(arguments, records, count, record_bytes, row, total)` that merges one row.

        `records` is where the row lies in the first record, `row` its number among all rows of the
        output, `total` is scratch memory. A row without keys has l = 0.
        """
        e = self.e
        arguments = [POINTER, POINTER, INT64, INT64, INT64, POINTER]
        with e.function("merge", arguments) as (function, args):
            arguments_, records, count, record_bytes, row, total = args
            b = e.builder
            v_head_dim = self.frame.field(arguments_, "v_head_dim")
            block_row = self.frame.block_row_bytes(v_head_dim)

            def load_softmax_state(c: Value) -> list[Value]:
                start = e.at(records, e.mul(c, record_bytes), block_row)
                return [e.load_vector(e.at(start, i * e.vector_bytes)) for i in range(STATE)]

            lowest, zero = e.const(-math.inf), e.const(0.0)
            (row_max,) = e.loop(
                0, count, 1, [lowest], lambda c, old: [e.greatest(old[0], load_softmax_state(c)[0])]
            )
            is_unseen = b.fcmp_ordered("==", row_max, lowest)
            shift = b.select(is_unseen, zero, row_max)
            e.clear(total, 0, block_row)

            def add_record(c: Value, sums: list[Value]) -> list[Value]:
                own_max, own_sum, sum_error, t_sum = load_softmax_state(c)
                exponent = b.fsub(own_max, shift)
                weight = vector_math.exp_flushed(e, exponent)
                out = e.at(records, e.mul(c, record_bytes))

                def add_vector(d: Value, _: list[Value]) -> None:
                    to = e.at(total, d)
                    e.store_vector(
                        e.fma(weight, e.load_vector(e.at(out, d)), e.load_vector(to)), to
                    )

                e.loop(0, block_row, e.vector_bytes, [], add_vector)
                added = b.fmul(weight, own_sum)
                row_sum = b.fadd(sums[0], added)
                rest = b.fsub(
                    vector_math.error_of_sum(e, sums[0], added, row_sum), b.fmul(weight, sum_error)
                )
                following = [row_sum, b.fadd(sums[1], rest)]
                if self.statistics:
                    rebased = e.fma(own_sum, e.greatest(e.const(-1e4), exponent), t_sum)
                    following.append(e.fma(weight, rebased, sums[2]))
                return following

            row_sum, rest, *t_sum = e.loop(0, count, 1, [zero] * (2 + self.statistics), add_record)
            row_sum, rest = vector_math.sum_of_lanes(e, row_sum, rest)
            t_sum = [e.reduce(x, b.fadd) for x in t_sum]
            empty = b.fcmp_ordered("==", row_sum, zero)
            divisor = b.select(empty, e.const(1.0), row_sum)
            statistics = row_max, row_sum, rest, empty, divisor, t_sum
            self._write_statistics(arguments_, row, *statistics)
            self._write_row(arguments_, row, total, divisor)
        return function

    def _write_statistics(
        self,
        arguments: Value,
        row: Value,
        row_max: Value,
        row_sum: Value,
        rest: Value,
        empty: Value,
        divisor: Value,
        t_sum: list[Value],
    ) -> None:
        """lse = m + log(l), and entropy = log(l) - T / l."""
        e, b = self.e, self.e.builder

        def write_first_lane(name: str, vector: Value) -> None:
            at = e.at(self.frame.pointer_field(arguments, name), e.mul(row, e.real_bytes))
            e.store(e.extract(vector, 0), at, e.real_bytes)

        zero, lowest = e.const(0.0), e.const(-math.inf)
        with b.if_then(b.icmp_signed("!=", self.frame.field(arguments, "lse"), e.index(0))):
            lse, _ = vector_math.add_log(e, row_max, row_sum, rest)
            write_first_lane("lse", b.select(empty, lowest, lse))
        if self.statistics:
            logarithm = vector_math.log(e, row_sum)
            entropy = b.fsub(logarithm, b.fdiv(t_sum[0], divisor))
            # Rounding may make the entropy of a single key slightly negative.
            is_negative = b.fcmp_ordered("<", entropy, zero)
            write_first_lane("entropy", b.select(b.or_(empty, is_negative), zero, entropy))
            write_first_lane("max_score", row_max)
            write_first_lane("max_weight", b.select(empty, zero, b.fdiv(e.const(1.0), divisor)))

    def _write_row(self, arguments: Value, row: Value, total: Value, divisor: Value) -> None:
        """out = O / l, rounded; adding 0 turns -0.0 into 0.0."""
        e, b, item = self.e, self.e.builder, storage.ITEM_BYTES[self.out_dtype]
        v_head_dim = self.frame.field(arguments, "v_head_dim")
        out = e.at(self.frame.pointer_field(arguments, "out"), e.mul(row, v_head_dim, item))

        def write_vector(d: Value, seen: list[Value]) -> list[Value]:
            x = b.fdiv(e.load_vector(e.at(total, e.mul(d, e.real_bytes))), divisor)
            x = b.fadd(x, e.const(0.0))
            storage.store(e, x, e.at(out, e.mul(d, item)), self.out_dtype)
            return [e.fma(x, e.const(0.0), seen[0])]

        def write_element(d: Value, seen: list[Value]) -> list[Value]:
            zero = ir.Constant(e.real, 0.0)
            x = e.load(e.at(total, e.mul(d, e.real_bytes)), e.real, e.real_bytes)
            x = b.fadd(b.fdiv(x, e.extract(divisor, 0)), zero)
            storage.store(e, x, e.at(out, e.mul(d, item)), self.out_dtype)
            return [e.fma(x, zero, seen[0])]

        whole = e.round_down(v_head_dim, e.lanes)
        (seen,) = e.loop(0, whole, e.lanes, [e.const(0.0)], write_vector)
        (last,) = e.loop(whole, v_head_dim, 1, [ir.Constant(e.real, 0.0)], write_element)
        self.frame.report_not_finite(arguments, b.fadd(seen, e.splat(last)))
