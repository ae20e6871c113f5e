"""Scores, weights and their tangents for one vector of queries and one block of keys."""

from __future__ import annotations

import math

from qkv.backends.cpu.backward.table_sums import TableSums
from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import Value
from qkv.backends.cpu.emit.forbidden_pairs import FORBIDDEN_WEIGHT
from qkv.backends.cpu.tangents.frame import PairArguments, TangentFrame
from qkv.backends.cpu.tangents.layout import PEAK_ROWS, TASK
from qkv.problem.language.derivative import ONE, ZERO, derivative
from qkv.problem.language.expressions import Node


def scores_function(frame: TangentFrame, name: str, masked: bool) -> Value:
    """Mods and mask make scores and their tangents of products; forbidden ones are -inf and 0."""
    e = frame.e
    with frame.pair_function(name) as (function, at):
        b, places = e.builder, frame.expressions(at)
        lowest, zero = e.const(-math.inf), e.const(0.0)
        # Without mods both are the same memory, which LLVM must not take for two.
        products = (at.scores, at.scores_dot) if frame.plain else (at.products, at.products_dot)

        def finish_key(k: Value, _: list[Value]) -> None:
            offset, kv_index = e.mul(k, at.width), e.add(at.kv_start, k)
            score, score_dot = (e.load_vector(e.at(area, offset)) for area in products)
            inner = places.at_key(kv_index, score)
            inner.known[frame.scaled_dot] = score_dot
            if not frame.plain:
                score, score_dot = inner.floats(frame.score), inner.floats(frame.score_dot)
            if masked:
                score = b.select(inner.condition(frame.mask), score, lowest)
            forbidden = b.fcmp_ordered("==", score, lowest)
            e.store_vector(score, e.at(at.scores, offset))
            e.store_vector(b.select(forbidden, zero, score_dot), e.at(at.scores_dot, offset))

        if not frame.plain:
            places.hoist(frame.score)
        if masked:
            places.hoist(frame.mask)
        e.loop(0, at.count, 1, [], finish_key)
    return function


def drop_function(frame: TangentFrame) -> Value:
    """dP and its tangent, times the factors of dropout."""
    e = frame.e
    with frame.pair_function("drop") as (function, at):
        places = frame.expressions(at)

        def drop_key(k: Value, _: list[Value]) -> None:
            factor = frame.dropout_factor(at.arguments, places, e.add(at.kv_start, k))
            for area in (at.d_weights, at.d_weights_dot):
                e.scale_vector(e.at(area, e.mul(k, at.width)), factor)

        e.loop(0, at.count, 1, [], drop_key)
    return function


def gradients_function(frame: TangentFrame) -> Value:
    """Weights and their tangents in place of scores, and dX and its tangent in place of dP.

    Forbidden weights are marked.

        w = exp(s - peak) / total           wdot = w (sdot - r)
        dS = w (dP - delta)                 dSdot = wdot (dP - delta) + w (dPdot - deltadot)

    in which sdot, dP and dPdot, and likewise r, delta and deltadot, are less what they are for the
    key of the largest score (see `rows`), and
        dX = scale dS s_x                   dXdot = scale (dSdot s_x + dS s_xdot)
                                            dtdot += dSdot s_t + dS s_tdot
    """
    e = frame.e
    with frame.pair_function("gradients") as (function, at):
        b = e.builder
        places = frame.expressions(at)
        share, lse_dot = (_real(frame, at, n) for n in ("share", "lse_dot"))
        peak, *origin = (_real(frame, at, n) for n in PEAK_ROWS)
        scale = e.splat(frame.real_field(at.arguments, "scale"))
        if frame.backward:
            delta, delta_dot = (_real(frame, at, n) for n in ("delta", "delta_dot"))
        tables = TableSums(frame, at.arguments, at.task, at.rows, TASK)
        slopes = {load: derivative(frame.score, load) for load in frame.loads}

        def differentiate_key(k: Value, sums: list[Value]) -> list[Value]:
            offset = e.mul(k, at.width)

            def load(area: Value) -> Value:
                return e.load_vector(e.at(area, offset))

            score = load(at.scores)
            weight = b.fmul(vector_math.exp_flushed(e, b.fsub(score, peak)), share)
            less_score_dot = b.fsub(b.fsub(load(at.scores_dot), origin[0]), lse_dot)
            weight_dot = b.fmul(weight, less_score_dot)
            forbidden = b.fcmp_ordered("==", score, e.const(-math.inf))

            def select(x: Value, otherwise: float = 0.0) -> Value:
                return b.select(forbidden, e.const(otherwise), x)

            if frame.backward:
                less = b.fsub(b.fsub(load(at.d_weights), origin[1]), delta)
                less_dot = b.fsub(b.fsub(load(at.d_weights_dot), origin[2]), delta_dot)
                grad = b.fmul(weight, less)
                grad_dot = e.fma(weight_dot, less, b.fmul(weight, less_dot))
                inner = places.at_key(e.add(at.kv_start, k), load(at.products))
                inner.known[frame.scaled_dot] = load(at.products_dot)

                def along(slope: Node, slope_dot: Node) -> Value:
                    """The tangent of `dS slope`."""
                    moved = grad_dot if slope == ONE else b.fmul(grad_dot, inner.floats(slope))
                    if slope_dot == ZERO:
                        return moved
                    return e.fma(grad, inner.floats(slope_dot), moved)

                sums = tables.add(
                    inner, lambda t: along(slopes[t], frame.load_slopes_dot[t]), forbidden, sums
                )
                grad_dot = along(frame.slope, frame.slope_dot)
                grad = grad if frame.slope == ONE else b.fmul(grad, inner.floats(frame.slope))
                e.store_vector(select(b.fmul(grad, scale)), e.at(at.d_weights, offset))
                grad_dot = select(b.fmul(grad_dot, scale))
                e.store_vector(grad_dot, e.at(at.d_weights_dot, offset))
            if frame.spec.dropout:
                factor = frame.dropout_factor(at.arguments, places, e.add(at.kv_start, k))
                weight, weight_dot = b.fmul(weight, factor), b.fmul(weight_dot, factor)
            e.store_vector(select(weight, FORBIDDEN_WEIGHT), e.at(at.scores, offset))
            e.store_vector(select(weight_dot), e.at(at.scores_dot, offset))
            return sums

        if not frame.plain:
            places.hoist(frame.score)
        tables.finish(places, e.loop(0, at.count, 1, tables.zeros(), differentiate_key))
    return function


def _real(frame: TangentFrame, at: PairArguments, name: str) -> Value:
    return frame.e.load_vector(frame.real_place(at.reals, at.width, name))
