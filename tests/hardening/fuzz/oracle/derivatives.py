"""The formulas of attention and of its derivatives, computed in any type and order of additions.

In float64 they are exact, as far as tests go; in a smaller type they are the plain computation that
the error bound of docs/semantics.md compares with: products, softmax and products, each rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .attention import Oracle, by_head, summed

Array = NDArray[Any]

__all__ = ["Plain", "gradients", "multiplied", "tangents"]


class Plain:
    """The forward pass in a type; `order` 0 adds as arrays lie, others shuffle what is added.

    With `stepwise`, every variant's change of the scores is rounded, and so is the sum: as whoever
    computes in that type has to.
    """

    def __init__(self, oracle: Oracle, dtype: Any, order: int = 0, stepwise: bool = False) -> None:
        self.oracle, self.dtype = oracle, np.dtype(dtype)
        self.compute = np.dtype(np.float64 if self.dtype == np.float64 else np.float32)
        rng = np.random.default_rng(order)
        self.dims, self.keys, self.rows = (
            rng.permutation(n) if order else slice(None)
            for n in (oracle.head_dim, oracle.kv_len, oracle.q_len)
        )
        with np.errstate(all="ignore"):
            self._softmax(stepwise)

    def rounded(self, array: Array) -> Array:
        """Rounded to the type, held in that of computation."""
        return np.asarray(array).astype(self.dtype).astype(self.compute)

    def _softmax(self, stepwise: bool) -> None:
        o, compute = self.oracle, self.compute
        self.query, self.key, self.value = (self.rounded(a) for a in (o.query, o.key, o.value))
        product = multiplied(self.query[..., self.dims], self.key[..., self.dims].swapaxes(-1, -2))
        raw = self.rounded(self.rounded(product) * compute.type(o.scale)).astype(np.float64)
        shape = np.broadcast_shapes(raw.shape, o.masked.shape)
        self.steps = [np.broadcast_to(raw, shape)]
        for mod in o.mods:
            before = self.steps[-1]
            new = mod.new(before.astype(compute if stepwise else np.float64))
            if stepwise:
                change = (new - before).astype(compute).astype(np.float64)
                new = (before + change).astype(compute).astype(np.float64)
            self.steps.append(new)
        scores = self.rounded(np.where(o.masked, self.steps[-1], -np.inf))
        sink = o.sink.astype(compute)
        peak = np.maximum(scores.max(axis=-1, initial=-np.inf), sink)
        shift = np.where(np.isneginf(peak), compute.type(0), peak)
        self.terms = np.exp(scores - shift[..., None])
        self.total = self.terms[..., self.keys].sum(axis=-1) + np.exp(sink - shift)
        self.sink_share = np.exp(sink - shift) / np.where(self.total == 0, 1, self.total)
        self.lse = np.where(np.isneginf(peak), peak, shift + np.log(self.total))
        self.weights = self.rounded(
            self.terms / np.where(self.total == 0, compute.type(1), self.total)[..., None]
        )

    @property
    def out(self) -> Array:
        """The output, rounded."""
        dropped = self.rounded(self.weights * self.oracle.factors)
        return self.rounded(multiplied(dropped[..., self.keys], self.value[..., self.keys, :]))


def multiplied(a: Array, b: Array) -> Array:
    """`a @ b`, added in its own type: of a single number, BLAS may add in a wider one.

    In a small product of float32 matrices, multiply-adds follow one another, each rounded once.
    Some BLAS add products of 8 rows and 8 columns in another order, which rounds less than that.
    """
    if a.shape[-2] == b.shape[-1] == 1:
        return np.sum(a * b.swapaxes(-1, -2), axis=-1, keepdims=True)
    is_vector = 1 in (a.shape[-2], b.shape[-1])
    if is_vector or a.dtype != np.float32 or a.size * b.shape[-1] > _FEW_PRODUCTS:
        return a @ b
    total = np.float32(0)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    for n in range(a.shape[-1]):
        total = (total + wide_a[..., n, None] * wide_b[..., n, None, :]).astype(np.float32)
    return np.asarray(total) if a.shape[-1] else a @ b


_FEW_PRODUCTS = 2**21
"""Multiply-adds up to which they follow one another; with more, the oracle takes too long."""


def gradients(
    oracle: Oracle, grad_out: Array, grad_lse: Array, dtype: Any, order: int = 0
) -> dict[str, Array]:
    """Gradients of query, key, value, "sinks", and each score variant's array by its number.

        dV = (w f)^T dO,   dS = w (f dO.v - delta + dlse),   delta[i] = sum_j w f dO.v
        dQ = scale dS k,   dK = scale dS^T q,   dsink = sum_i exp(sink - lse) (dlse - delta)

    with dS continued through the score variants, the last one first.
    """
    plain = Plain(oracle, dtype, order)
    rounded, compute, keys, rows = plain.rounded, plain.compute, plain.keys, plain.rows
    factors, d_out = oracle.factors.astype(compute), rounded(grad_out)
    found: dict[str, Array] = {}
    with np.errstate(all="ignore"):
        weights = plain.weights
        dropped = rounded(weights * factors)
        grad_value = dropped[..., rows, :].swapaxes(-1, -2) @ d_out[..., rows, :]
        grad_weights = rounded(d_out @ plain.value.swapaxes(-1, -2)) * factors
        delta = (weights * grad_weights)[..., keys].sum(axis=-1) - grad_lse.astype(compute)
        grad_scores = rounded(weights * (grad_weights - delta[..., None]))
        sinks = (-plain.sink_share * delta).astype(np.float64)
        found["sinks"] = by_head(sinks[..., None])
        for number, mod in reversed([*enumerate(oracle.mods)]):
            before = plain.steps[number]
            if mod.of_own is not None:
                own = np.where(oracle.allowed, grad_scores, compute.type(0))
                at = np.where(oracle.allowed, before, 0.0).astype(compute)
                found[str(number)] = mod.of_own(at, own).astype(np.float64)
            slope = mod.slope(before.astype(compute))
            grad_scores = np.where(oracle.allowed, grad_scores * slope.astype(compute), 0)
        grad_scores = rounded(grad_scores * compute.type(oracle.scale))
        grad_query = grad_scores[..., keys] @ plain.key[..., keys, :]
        grad_key = grad_scores[..., rows, :].swapaxes(-1, -2) @ plain.query[..., rows, :]
    found["query"] = summed(oracle.turned_back(grad_query.astype(float), 1), oracle.shapes[0])
    for name, gradient, shape in (
        ("key", oracle.turned_back(grad_key.astype(float), -1), oracle.shapes[1]),
        ("value", grad_value.astype(float), oracle.shapes[2]),
    ):
        groups = gradient.shape[:-3], shape[-3], oracle.group_size, gradient.shape[-2:]
        each = gradient.reshape(*groups[0], groups[1], groups[2], *groups[3]).sum(axis=-3)
        found[name] = summed(each, shape)
    return found


def tangents(
    oracle: Oracle, along: Mapping[str, Array], dtype: Any, order: int = 0
) -> tuple[Array, Array]:
    """How output and lse change along tangents of query, key, value, and arrays of variants.

        ds = scale (dq.k + q.dk), continued through the score variants, the first one first
        dlse[i] = sum_j w ds + exp(sink - lse) dsink,   dout[i] = sum_j w f (dv + (ds - dlse) v)

    `along` has them as the oracle has its arrays: key and value with heads repeated, those of
    variants by their number, and "sinks".
    """
    plain = Plain(oracle, dtype, order)
    rounded, compute, keys, dims = plain.rounded, plain.compute, plain.keys, plain.dims
    d_query = rounded(oracle.turned(along["query"], 1))
    d_key = rounded(oracle.turned(along["key"], -1))
    with np.errstate(all="ignore"):
        moved = d_query[..., dims] @ plain.key[..., dims].swapaxes(-1, -2)
        moved = rounded(moved) + rounded(plain.query[..., dims] @ d_key[..., dims].swapaxes(-1, -2))
        moved = rounded(moved * compute.type(oracle.scale))
        for number, mod in enumerate(oracle.mods):
            moved = moved * mod.slope(plain.steps[number].astype(compute)).astype(compute)
            if str(number) in along and mod.along is not None:
                moved = moved + mod.along(along[str(number)]).astype(compute)
        moved = np.where(oracle.allowed, moved, compute.type(0))
        d_lse = (plain.weights * moved)[..., keys].sum(axis=-1)
        d_lse = d_lse + plain.sink_share * along["sinks"].astype(compute)[..., None]
        change = rounded(plain.weights * oracle.factors.astype(compute))
        by_score = rounded(change * (moved - d_lse[..., None]))
        d_value = rounded(along["value"])
        d_out = change[..., keys] @ d_value[..., keys, :]
        d_out = d_out + by_score[..., keys] @ plain.value[..., keys, :]
    return rounded(d_out).astype(float), d_lse.astype(float)
