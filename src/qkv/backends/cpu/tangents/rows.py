"""Sums over the rows of a block of queries, in float64, before, in and after the first pass.

What is added is how each key differs from the one of the largest score. Otherwise large terms would
cancel in rows where one key has nearly all the weight, and rounding would be all that is left.
"""

from __future__ import annotations

import math

from llvmlite import ir

from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Value
from qkv.backends.cpu.tangents.frame import TangentFrame
from qkv.backends.cpu.tangents.layout import PEAK_ROWS, SUM_ROWS


def begin_rows_function(frame: TangentFrame) -> Value:
    """The sums before the first key: a sink is a key of value 0.

    A function `(arguments, sums, reals, width, head)`.
    """
    e = frame.e
    with e.function("begin_rows", [*[POINTER] * 3, INT64, INT64]) as (function, args):
        arguments, sums, reals, width, head = args
        b = e.builder
        sink, sink_dot = (_of_head(frame, arguments, name, head) for name in ("sinks", "sinks_dot"))
        is_there = b.fcmp_ordered("!=", sink, e.const(-math.inf))
        total = frame.as_wide(b.select(is_there, e.const(1.0), e.const(0.0)))
        peaks = sink, b.select(is_there, sink_dot, e.const(0.0)), e.const(0.0), e.const(0.0)
        for name, value in zip(PEAK_ROWS, peaks, strict=True):
            e.store_vector(value, frame.real_place(reals, width, name))
        nothing = [ir.Constant(frame.wide_vector, None)] * (len(SUM_ROWS) - 1)
        for name, value in zip(SUM_ROWS, (total, *nothing), strict=True):
            frame.store_sum(value, frame.sum_place(sums, width, name))
    return function


def _of_head(frame: TangentFrame, arguments: Value, name: str, head: Value) -> Value:
    """A number of a head in every lane."""
    e = frame.e
    place = e.at(frame.pointer_field(arguments, name), e.mul(head, e.real_bytes))
    return e.splat(e.load(place, e.real, e.real_bytes))


def add_rows_function(frame: TangentFrame) -> Value:
    """Add one block of keys to the sums of one vector of queries, from a new peak if it has one."""
    e = frame.e
    with frame.pair_function("add_rows") as (function, at):
        b = e.builder
        areas = [at.scores, at.scores_dot, *([at.d_weights, at.d_weights_dot] * frame.backward)]
        names = SUM_ROWS if frame.backward else SUM_ROWS[:2]
        peaks = [frame.real_place(at.reals, at.width, name) for name in PEAK_ROWS[: len(areas)]]
        places = [frame.sum_place(at.sums, at.width, name) for name in names]

        def load_key(k: Value) -> list[Value]:
            """Score, sdot, and with cotangents dP and dPdot; where a pair is forbidden, 0."""
            score, *others = (e.load_vector(e.at(area, e.mul(k, at.width))) for area in areas)
            forbidden = b.fcmp_ordered("==", score, e.const(-math.inf))
            return [score, *(b.select(forbidden, e.const(0.0), x) for x in others)]

        def find_peak(k: Value, best: list[Value]) -> list[Value]:
            found = load_key(k)
            is_larger = b.fcmp_ordered(">", found[0], best[0])
            return [b.select(is_larger, *pair) for pair in zip(found, best, strict=True)]

        old = [e.load_vector(place) for place in peaks]
        new = e.loop(0, at.count, 1, old, find_peak)
        for value, place in zip(new, peaks, strict=True):
            e.store_vector(value, place)
        shift = _shift(frame, new[0])
        origin = [frame.as_wide(x) for x in new[1:]]

        def add_key(k: Value, sums: list[Value]) -> list[Value]:
            score, *others = load_key(k)
            weight = frame.as_wide(vector_math.exp_flushed(e, b.fsub(score, shift)))
            less = [b.fsub(frame.as_wide(x), y) for x, y in zip(others, origin, strict=True)]
            moved = b.fmul(weight, less[0])
            following = [b.fadd(sums[0], weight), b.fadd(sums[1], moved)]
            if frame.backward:
                terms = (weight, less[1]), (moved, less[1]), (weight, less[2])
                following += [
                    _multiply_add(frame, *term, total)
                    for term, total in zip(terms, sums[2:], strict=True)
                ]
            return following

        factor = frame.as_wide(_exp_less(frame, old[0], shift))
        before = [b.fmul(frame.load_sum(place), factor) for place in places]
        changes = [b.fsub(frame.as_wide(x), y) for x, y in zip(old[1:], origin, strict=True)]
        before = _from_new_peak(frame, before, changes)
        nothing = [ir.Constant(frame.wide_vector, None)] * len(names)
        found = e.loop(0, at.count, 1, nothing, add_key)
        for x, y, place in zip(before, found, places, strict=True):
            frame.store_sum(b.fadd(x, y), place)
    return function


def _from_new_peak(frame: TangentFrame, sums: list[Value], changes: list[Value]) -> list[Value]:
    """The sums of `SUM_ROWS` if what is subtracted from x, p and pdot changes."""
    total, moved, *others = sums
    new_moved = _multiply_add(frame, changes[0], total, moved)
    if not others:
        return [total, new_moved]
    d_mean, moved_d_mean, d_mean_dot = others
    new_d_mean = _multiply_add(frame, changes[1], total, d_mean)
    # (x + a) (p + c) = x p + a (p + c) + c x
    moved_d_mean = _multiply_add(frame, changes[0], new_d_mean, moved_d_mean)
    moved_d_mean = _multiply_add(frame, changes[1], moved, moved_d_mean)
    d_mean_dot = _multiply_add(frame, changes[2], total, d_mean_dot)
    return [total, new_moved, new_d_mean, moved_d_mean, d_mean_dot]


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
        total, *others = (frame.load_sum(frame.sum_place(sums, width, name)) for name in SUM_ROWS)
        empty = b.fcmp_ordered("==", total, zero)
        share = b.select(empty, zero, b.fdiv(one, b.select(empty, one, total)))
        moved, d_mean, moved_d_mean, d_mean_dot = (b.fmul(x, share) for x in others)

        def load(name: str) -> Value:
            return e.load_vector(frame.real_place(reals, width, name))

        peak, score_dot, d_weight, d_weight_dot = (load(name) for name in PEAK_ROWS)
        found = {"peak": _shift(frame, peak), "share": frame.as_real(share), "lse_dot": moved}
        written = {"lse_dot": b.fadd(frame.as_wide(score_dot), moved)}
        if frame.backward:
            delta = b.fsub(d_mean, frame.as_wide(load("grad_lse")))
            covariance = b.fsub(moved_d_mean, b.fmul(moved, d_mean))
            delta_dot = b.fadd(covariance, d_mean_dot)
            found |= {"delta": delta, "delta_dot": delta_dot}
            sink = _of_head(frame, arguments, "sinks", head)
            of_sink = frame.as_wide(_exp_less(frame, sink, found["peak"]))
            written |= {
                "delta": b.fadd(frame.as_wide(d_weight), delta),
                "delta_dot": b.fadd(frame.as_wide(d_weight_dot), delta_dot),
                "sink_share": b.fmul(of_sink, share),
            }
        for name, value in found.items():
            e.store_vector(frame.as_real(value), frame.real_place(reals, width, name))
        live = e.first_lanes(e.least(count, e.lanes))
        for name, value in written.items():
            start = e.at(frame.pointer_field(arguments, f"{name}_rows"), e.mul(row, 8))
            e.store_where(live, value, start, 8)
    return function
