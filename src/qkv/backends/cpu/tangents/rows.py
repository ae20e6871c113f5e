"""Sums over the rows of a block of queries, in float64, before, in and after the first pass.

Large terms cancel in rows where one key has nearly all the weight, so that sums of rounded numbers
would lose what is left. Beside the products, float64 costs little.
"""

from __future__ import annotations

import math

from llvmlite import ir

from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Value
from qkv.backends.cpu.tangents.frame import TangentFrame
from qkv.backends.cpu.tangents.layout import ROWS, SUM_ROWS


def begin_rows_function(frame: TangentFrame) -> Value:
    """The sums before the first key: a sink is a key of value 0.

    A function `(arguments, sums, reals, width, head)`.
    """
    e = frame.e
    with e.function("begin_rows", [*[POINTER] * 3, INT64, INT64]) as (function, args):
        arguments, sums, reals, width, head = args
        b = e.builder
        sink, sink_dot = (
            e.splat(e.load(e.at(frame.pointer_field(arguments, name), e.mul(head, e.real_bytes)),
                           e.real, e.real_bytes))
            for name in ("sinks", "sinks_dot")
        )  # fmt: skip
        is_there = b.fcmp_ordered("!=", sink, e.const(-math.inf))
        total = b.select(is_there, e.const(1.0), e.const(0.0))
        e.store_vector(sink, frame.real_place(reals, width, "peak"))
        zero = ir.Constant(frame.wide_vector, None)
        moved = frame.as_wide(b.select(is_there, sink_dot, e.const(0.0)))
        for name, value in zip(SUM_ROWS, (frame.as_wide(total), moved, zero, zero), strict=True):
            frame.store_sum(value, frame.sum_place(sums, width, name))
    return function


def add_rows_function(frame: TangentFrame) -> Value:
    """Add one block of keys to the sums of one vector of queries, and advance its peak."""
    e = frame.e
    with frame.pair_function("add_rows") as (function, at):
        b = e.builder

        def load(area: Value, k: Value) -> Value:
            return e.load_vector(e.at(area, e.mul(k, at.width)))

        (largest,) = e.loop(
            0, at.count, 1, [e.const(-math.inf)],
            lambda k, best: [e.greatest(best[0], load(at.scores, k))],
        )  # fmt: skip
        place = frame.real_place(at.reals, at.width, "peak")
        old = e.load_vector(place)
        peak = e.greatest(old, largest)
        e.store_vector(peak, place)
        shift = _shift(frame, peak)
        factor = frame.as_wide(_exp_less(frame, old, shift))
        names = SUM_ROWS if frame.backward else SUM_ROWS[:2]
        places = [frame.sum_place(at.sums, at.width, name) for name in names]

        def add_key(k: Value, sums: list[Value]) -> list[Value]:
            score = load(at.scores, k)
            forbidden = b.fcmp_ordered("==", score, e.const(-math.inf))
            weight = frame.as_wide(vector_math.exp_flushed(e, b.fsub(score, shift)))
            moved = b.fmul(weight, frame.as_wide(load(at.scores_dot, k)))
            following = [b.fadd(sums[0], weight), b.fadd(sums[1], moved)]
            if frame.backward:
                d_weight, d_weight_dot = (
                    frame.as_wide(b.select(forbidden, e.const(0.0), load(area, k)))
                    for area in (at.d_weights, at.d_weights_dot)
                )
                mean_dot = _multiply_add(frame, moved, d_weight, sums[3])
                following += [
                    _multiply_add(frame, weight, d_weight, sums[2]),
                    _multiply_add(frame, weight, d_weight_dot, mean_dot),
                ]
            return following

        before = [b.fmul(frame.load_sum(sum_place), factor) for sum_place in places]
        for total, sum_place in zip(e.loop(0, at.count, 1, before, add_key), places, strict=True):
            frame.store_sum(total, sum_place)
    return function


def _multiply_add(frame: TangentFrame, x: Value, y: Value, total: Value) -> Value:
    if not frame.e.fused:
        return frame.e.builder.fadd(frame.e.builder.fmul(x, y), total)
    return frame.e.intrinsic("fma", x, y, total)


def _shift(frame: TangentFrame, peak: Value) -> Value:
    """The peak, or 0 in a row that has seen no key, where -inf - -inf would be NaN."""
    e, b = frame.e, frame.e.builder
    return b.select(b.fcmp_ordered("==", peak, e.const(-math.inf)), e.const(0.0), peak)


def _exp_less(frame: TangentFrame, x: Value, shift: Value) -> Value:
    """exp(x - shift), which is 1 where both are the same infinity."""
    e, b = frame.e, frame.e.builder
    power = vector_math.exp_flushed(e, b.fsub(x, shift))
    return b.select(b.fcmp_ordered("==", x, shift), e.const(1.0), power)


def end_rows_function(frame: TangentFrame) -> Value:
    """The numbers that the second pass needs, from the sums of the first; `ROWS` are written.

    A function `(arguments, sums, reals, width, head, row, count)`; `row` is the first query among
    those of all heads, of which `count` are left, none for a vector beyond the last one.
    """
    e = frame.e
    with e.function("end_rows", [*[POINTER] * 3, *[INT64] * 4]) as (function, args):
        arguments, sums, reals, width, head, row, count = args
        b = e.builder
        zero, one = (ir.Constant(frame.wide_vector, [x] * e.lanes) for x in (0.0, 1.0))
        total, moved, d_mean, d_mean_dot = (
            frame.load_sum(frame.sum_place(sums, width, name)) for name in SUM_ROWS
        )
        empty = b.fcmp_ordered("==", total, zero)
        share = b.select(empty, zero, b.fdiv(one, b.select(empty, one, total)))

        def place(name: str) -> Value:
            return frame.real_place(reals, width, name)

        shift = _shift(frame, e.load_vector(place("peak")))
        e.store_vector(shift, place("peak"))
        found = {"share": share, "lse_dot": b.fmul(moved, share)}
        written = {"lse_dot": found["lse_dot"]}
        if frame.backward:
            d_mean, d_mean_dot = b.fmul(d_mean, share), b.fmul(d_mean_dot, share)
            grad_lse = frame.as_wide(e.load_vector(place("grad_lse")))
            found["delta"] = b.fsub(d_mean, grad_lse)
            found["delta_dot"] = b.fsub(d_mean_dot, b.fmul(found["lse_dot"], d_mean))
            sinks = e.at(frame.pointer_field(arguments, "sinks"), e.mul(head, e.real_bytes))
            sink = e.splat(e.load(sinks, e.real, e.real_bytes))
            of_sink = frame.as_wide(_exp_less(frame, sink, shift))
            written = {n: found[n] for n in ROWS if n in found}
            written["sink_share"] = b.fmul(of_sink, share)
        for name, value in found.items():
            e.store_vector(frame.as_real(value), place(name))
        live = e.first_lanes(e.least(count, e.lanes))
        for name, value in written.items():
            start = e.at(frame.pointer_field(arguments, f"{name}_rows"), e.mul(row, 8))
            e.store_where(live, value, start, 8)
    return function
