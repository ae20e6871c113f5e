"""Attention as the formula is written, in jax.numpy, for `jax.grad`: what gradients are held to.

Which pairs are allowed, what dropout leaves and where rows stand is taken from the oracle; all that
has a derivative is written here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import qkv
from qkv.testing import Truth
from qkv.variants.scores.alibi import alibi_slopes
from qkv.variants.scores.relative_bias import relative_buckets

Array = Any

OWN = {qkv.Bias: "array", qkv.ALiBi: "slopes", qkv.RelativeBias: "table", qkv.Sinks: "values"}
"""The field of a variant whose array has a gradient."""


def attention(
    query: Array, key: Array, value: Array, truth: Truth, own: dict[int, Array]
) -> tuple[Array, Array]:
    """`out, lse` of a call that the oracle has seen; `own` has arrays of variants by number."""
    lead, heads = truth.out.shape[:-3], truth.out.shape[-3]
    key, value = (jnp.repeat(a, heads // a.shape[-3], axis=-3) for a in (key, value))
    positions = [
        np.array([getattr(head, side) for head in truth.heads]).reshape(*lead, heads, -1)
        for side in ("q_pos", "kv_pos")
    ]
    for variant in truth.variants:
        if isinstance(variant, qkv.RoPE):
            query, key = (
                turned(x, variant, where) for x, where in zip((query, key), positions, strict=True)
            )
    s = jnp.einsum("...id,...jd->...ij", query, key) * query.shape[-1] ** -0.5
    distance = positions[0][..., :, None] - positions[1][..., None, :]
    for n, variant in enumerate(truth.variants):
        s = modified(s, variant, own.get(n), distance)
    s = jnp.where(truth.allowed, s, -jnp.inf)
    sinks = [own[n] for n, v in enumerate(truth.variants) if isinstance(v, qkv.Sinks)]
    if sinks:
        column = jnp.broadcast_to(jnp.atleast_1d(sinks[0])[:, None, None], (*s.shape[:-1], 1))
        s = jnp.concatenate([s, column], axis=-1)
    empty = jnp.isneginf(s).all(-1, keepdims=True)
    filled = jnp.where(empty, 0.0, s)
    weights = jnp.where(empty, 0.0, jax.nn.softmax(filled, axis=-1))
    lse = jnp.where(empty[..., 0], -jnp.inf, jax.nn.logsumexp(filled, axis=-1))
    kept = weights[..., : truth.scores.shape[-1]] * truth.factors
    return jnp.einsum("...ij,...jd->...id", kept.astype(value.dtype), value), lse


def modified(s: Array, variant: Any, own: Array, distance: Any) -> Array:
    heads = s.shape[-3]
    if isinstance(variant, qkv.Bias):
        return s + jnp.where(jnp.isneginf(own), 0.0, own)
    if isinstance(variant, qkv.ALiBi):
        slopes = alibi_slopes(heads) if own is None else own
        return s - jnp.broadcast_to(slopes, (heads,))[:, None, None] * np.abs(distance)
    if isinstance(variant, qkv.RelativeBias):
        buckets = relative_buckets(-distance, len(own), variant.bidirectional, variant.max_distance)
        return s + own[buckets, np.arange(heads)[:, None, None]]
    if isinstance(variant, qkv.Softcap):
        return variant.cap * jnp.tanh(s / variant.cap)
    return s


def turned(x: Array, rope: Any, positions: Any) -> Array:
    frequencies = rope.frequencies(x.shape[-1])
    n = len(frequencies)
    angle = positions[..., None] * frequencies
    first, second = np.arange(n), np.arange(n, 2 * n)
    if rope.layout == "interleaved":
        first, second = np.arange(0, 2 * n, 2), np.arange(1, 2 * n, 2)
    a, b = x[..., first], x[..., second]
    cos, sin = (rope.attention_factor * turn(angle) for turn in (np.cos, np.sin))
    both = [a * cos - b * sin, a * sin + b * cos]
    rows = jnp.concatenate(both, axis=-1)[..., np.argsort([*first, *second])]
    return jnp.concatenate([rows, x[..., 2 * n :]], axis=-1)
