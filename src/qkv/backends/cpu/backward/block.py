"""Weights and gradients of scores for one block of queries and one block of keys.

The products P = exp(Q K^T - lse) and dP = dO V^T are emitted for all vectors of queries of a block
at once; the functions between them, which go from key to key, for one vector (`vector_function`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from qkv.backends.cpu.backward.frame import DELTA_REST, EXPECTED_SUM, BackwardFrame
from qkv.backends.cpu.backward.table_sums import TableSums
from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Emitter, Value
from qkv.backends.cpu.emit.forbidden_pairs import FORBIDDEN_WEIGHT, is_forbidden
from qkv.backends.cpu.forward.boundary_blocks import write_range
from qkv.backends.cpu.products.query_lanes import SumOrder, store_vectors, vectors_at
from qkv.problem.language.derivative import derivative
from qkv.problem.language.expressions import Load

_CHAIN_OF_KEYS = 16
"""This many keys are added one after the other before the sums are combined."""


# P, one block of keys


def products_function(frame: BackwardFrame, vectors: int) -> Value:
    """P[k, :] = exp(scale * K[k, :] . packed Q - lse); with mods, the products alone.

    Scores are rounded where the forward pass that lse comes from rounds them, so that the weights
    are the same.
    """
    e = frame.e
    arguments = [*[POINTER] * 6, *[INT64] * 3]
    with e.function(f"products_{vectors}", arguments) as (function, args):
        arguments_, key, packed, lse, lse_rest, out, key_row, head_dim, count = args
        shifts, rests = (vectors_at(e, rows, vectors) for rows in (lse, lse_rest))
        scale = e.splat(frame.real_field(arguments_, "scale"))

        def weight_of_product(n: int, product: Value) -> Value:
            less_lse = b.fsub(b.fmul(product, scale), shifts[n % vectors])
            return vector_math.exp_flushed(e, b.fsub(less_lse, rests[n % vectors]))

        b = e.builder

        def store_key(k: Value, products: list[Value], _: list[Value]) -> list[Value]:
            if frame.plain:
                products = [weight_of_product(n, product) for n, product in enumerate(products)]
            store_vectors(e, e.at(out, e.mul(k, vectors * e.vector_bytes)), products)
            return []

        frame.dot_rows(
            key, key_row, count, packed, vectors, head_dim, store_key,
            SumOrder(chain=frame.chain_of_products, wide=frame.shape.wide),
        )  # fmt: skip
    return function


def seen_range_function(frame: BackwardFrame) -> Value:
    """The range of keys of a block that one vector of queries may see.

    A function `(arguments, batch, head, first_row, rows, kv_start, count, range)`.
    """
    e = frame.e
    with e.function("seen", [POINTER, *[INT64] * 6, POINTER]) as (function, args):
        arguments, *where, kv_start, count, key_range = args
        write_range(
            e, frame.expressions_of_rows(arguments, *where), frame.mask, kv_start, count, key_range
        )
    return function


def weights_function(frame: BackwardFrame, name: str, masked: bool) -> Value:
    """Mods and mask make P of the products; forbidden pairs are marked."""
    e = frame.e
    with frame.vector_function(name) as (function, at):
        b = e.builder
        places = frame.places(at)
        scale = e.splat(frame.real_field(at.arguments, "scale"))
        lse, rest = e.load_vector(at.lse), e.load_vector(at.lse_rest)

        def weigh_key(k: Value, _: list[Value]) -> None:
            place = e.at(at.weights, e.mul(k, at.width))
            kv_index = e.add(at.kv_start, k)
            if frame.plain:
                weight = e.load_vector(place)
                allowed = places.at_key(kv_index, e.const(0.0)).condition(frame.mask)
            else:
                product = e.load_vector(e.at(at.products, e.mul(k, at.width)))
                inner = places.at_key(kv_index, b.fmul(product, scale))
                score = inner.floats(frame.score)
                weight = vector_math.exp_flushed(e, b.fsub(b.fsub(score, lse), rest))
                allowed = b.fcmp_unordered("!=", score, e.const(-math.inf))
                if masked:
                    allowed = b.and_(allowed, inner.condition(frame.mask))
            e.store_vector(b.select(allowed, weight, e.const(FORBIDDEN_WEIGHT)), place)

        if not frame.plain:
            places.hoist(frame.score)
        if masked:
            places.hoist(frame.mask)
        e.loop(0, at.count, 1, [], weigh_key)
    return function


def dropout_function(frame: BackwardFrame) -> Value:
    """Dropout factors of one block of keys."""
    e = frame.e
    with frame.vector_function("dropout") as (function, at):
        places = frame.places(at)

        def store_factor(k: Value, _: list[Value]) -> None:
            factor = frame.dropout_factor(at.arguments, places, e.add(at.kv_start, k))
            e.store_vector(factor, e.at(at.factors, e.mul(k, at.width)))

        e.loop(0, at.count, 1, [], store_factor)
    return function


def drop_weights_function(frame: BackwardFrame) -> Value:
    """P becomes f * P, with the dropout factors f."""
    e = frame.e
    with frame.vector_function("drop_weights") as (function, at):

        def drop_key(k: Value, _: list[Value]) -> None:
            weight, factor = (e.at(area, e.mul(k, at.width)) for area in (at.weights, at.factors))
            product = e.builder.fmul(e.load_vector(weight), e.load_vector(factor))
            e.store_vector(product, weight)

        e.loop(0, at.count, 1, [], drop_key)
    return function


# Gradients of scores after (dS) and before (dX) the score mods


def score_gradients_function(frame: BackwardFrame, vectors: int) -> Value:
    """dS[k, :] = P * (f * V[k, :] . packed dO - delta), times scale if no mod is between.

    `delta` is a sum of two rows, one of each half of v_head_dim, and of the row `DELTA_REST`, if
    there was a delta correction.
    """
    e = frame.e
    arguments = [*[POINTER] * 7, *[INT64] * 3]
    with e.function(f"score_gradients_{vectors}", arguments) as (function, args):
        (arguments_, value, packed, delta, weights, factors, out,
         value_row, v_head_dim, count) = args  # fmt: skip
        b = e.builder
        scale = e.splat(frame.real_field(arguments_, "scale"))

        def delta_rows(half: int) -> list[Value]:
            return vectors_at(e, delta, vectors, half)

        deltas = [b.fadd(*pair) for pair in zip(delta_rows(0), delta_rows(1), strict=True)]
        rests = delta_rows(DELTA_REST) if frame.has_delta_rest else None

        def score_gradient(place: Value, difference: Value, n: int) -> Value:
            weight = e.load_vector(e.at(weights, place))
            if frame.spec.dropout:
                factor = e.load_vector(e.at(factors, place))
                difference = b.fsub(b.fmul(difference, factor), deltas[n])
            if rests is not None:
                difference = b.fsub(difference, rests[n])
            share = weight if frame.applies_chain_rule else b.fmul(weight, scale)
            gradient = b.fmul(share, difference)
            if frame.may_forbid:
                gradient = b.select(is_forbidden(e, weight), e.const(0.0), gradient)
            return gradient

        def store_gradients(k: Value, products: list[Value], _: list[Value]) -> list[Value]:
            for n, product in enumerate(products):
                place = e.add(e.mul(k, vectors * e.vector_bytes), n * e.vector_bytes)
                gradient = score_gradient(place, product, n % vectors)
                e.store_vector(gradient, e.at(out, place))
            return []

        less = None if frame.spec.dropout else delta_rows
        frame.dot_rows(
            value, value_row, count, packed, vectors, v_head_dim, store_gradients,
            SumOrder(means_of_half=less, wide=frame.wide),
        )  # fmt: skip
    return function


def correct_sums_function(frame: BackwardFrame) -> Value:
    """Correct dS of queries that see keys of this block only, to add up to the row `EXPECTED_SUM`.

    The excess of their sum is the error of delta: each dS has that error times its weight. Where dS
    is scaled, the expected sum is scaled too.
    """
    e = frame.e
    with frame.vector_function("settle") as (function, at):
        b = e.builder

        def load_gradient(k: Value) -> Value:
            return e.load_vector(e.at(at.score_grads, e.mul(k, at.width)))

        expected = e.load_vector(e.at(at.lse, e.mul(at.width, EXPECTED_SUM)))
        if not frame.applies_chain_rule:
            expected = b.fmul(expected, e.splat(frame.real_field(at.arguments, "scale")))
        excess = b.fsub(sum_over_keys(e, at.count, load_gradient), expected)

        def correct_key(k: Value, _: list[Value]) -> None:
            weight = e.load_vector(e.at(at.weights, e.mul(k, at.width)))
            corrected = b.fsub(load_gradient(k), b.fmul(weight, excess))
            if frame.may_forbid:
                corrected = b.select(is_forbidden(e, weight), e.const(0.0), corrected)
            e.store_vector(corrected, e.at(at.score_grads, e.mul(k, at.width)))

        e.loop(0, at.count, 1, [], correct_key)
    return function


def chain_rule_function(frame: BackwardFrame) -> Value:
    """Table gradients from dS, then dX in its place."""
    e = frame.e
    with frame.vector_function("chain") as (function, at):
        b = e.builder
        places = frame.places(at)
        scale = e.splat(frame.real_field(at.arguments, "scale"))
        tables = TableSums(frame, at.arguments, at.task, at.rows)
        slopes = {load: derivative(frame.score, load) for load in frame.loads}

        def differentiate_key(k: Value, sums: list[Value]) -> list[Value]:
            place = e.mul(k, at.width)
            score_grad = e.load_vector(e.at(at.score_grads, place))
            product = b.fmul(e.load_vector(e.at(at.products, place)), scale)
            forbidden = is_forbidden(e, e.load_vector(e.at(at.weights, place)))
            inner = places.at_key(e.add(at.kv_start, k), product)

            def share_of(load: Load) -> Value:
                return b.fmul(score_grad, inner.floats(slopes[load]))

            following = tables.add(inner, share_of, forbidden, sums)
            grad = b.fmul(b.fmul(score_grad, scale), inner.floats(frame.slope))
            grad = b.select(forbidden, e.const(0.0), grad)
            e.store_vector(grad, e.at(at.score_grads, place))
            return following

        places.hoist(frame.score)
        sums = e.loop(0, at.count, 1, tables.zeros(), differentiate_key)
        tables.finish(places, sums)
    return function


def sum_over_keys(e: Emitter, count: Value, term: Callable[[Value], Value]) -> Value:
    """The sum of `term(k)`, in short chains: rounding errors grow with the length of a chain."""
    nothing = [e.const(0.0)]

    def add_key(k: Value, total: list[Value]) -> list[Value]:
        return [e.builder.fadd(total[0], term(k))]

    def add_chain(k: Value, total: list[Value]) -> list[Value]:
        (chain,) = e.loop(k, e.least(e.add(k, _CHAIN_OF_KEYS), count), 1, nothing, add_key)
        return [e.builder.fadd(total[0], chain)]

    return e.loop(0, count, _CHAIN_OF_KEYS, nothing, add_chain)[0]
