"""`ring_attention` on four devices beside the definition on one; a program of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import qkv
import qkv.jax

LENGTH, FEW, HEADS, DIM = 64, 16, 4, 8
Q_POS, KV_POS = jnp.arange(LENGTH)[:, None], jnp.arange(LENGTH)
FAR = KV_POS - Q_POS
CAUSAL = FAR <= 0

Case = tuple[Callable[..., tuple[Any, ...]], Callable[..., Any], tuple[Any, ...]]
"""Variants of learned arrays, what they make of scores, and the arrays."""


def forbidding(allowed: Any) -> Callable[..., Any]:
    return lambda s: jnp.where(allowed, s, -jnp.inf)


def rotated(x: Any) -> Any:
    angles = jnp.arange(LENGTH)[:, None] * 10000.0 ** (-jnp.arange(0, DIM, 2) / DIM)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    low, high = x[..., : DIM // 2], x[..., DIM // 2 :]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])
CASES: dict[str, Case] = {
    "plain": (lambda: (), lambda s: s, ()),
    "causal": (lambda: (qkv.Causal(),), forbidding(CAUSAL), ()),
    "window or prefix": (
        lambda: (qkv.SlidingWindow(9, 0) | qkv.Prefix(5), ~qkv.Prefix(2)),
        forbidding((CAUSAL & (FAR >= -9) | (KV_POS < 5)) & (KV_POS >= 2)), (),
    ),
    "alibi and cap": (
        lambda: (qkv.Causal(), qkv.Softcap(2.0), qkv.ALiBi(SLOPES)),
        lambda s: jnp.where(
            CAUSAL, 2 * jnp.tanh(s / 2) - SLOPES[:, None, None] * jnp.abs(FAR), -jnp.inf
        ), (),
    ),
    "t5": (
        lambda table: (qkv.RelativeBias(table, bidirectional=False, max_distance=8), qkv.Causal()),
        lambda s, table: jnp.where(
            CAUSAL, s + table[jnp.clip(-FAR, 0, 7)].transpose(2, 0, 1), -jnp.inf
        ), (np.random.default_rng(5).normal(size=(8, HEADS)),),
    ),
    "rope": (lambda: (qkv.Causal(), qkv.RoPE()), forbidding(CAUSAL), ()),
    "few queries from the start": (
        lambda: (qkv.Causal("start") & qkv.SlidingWindow(9, 3),),
        forbidding((FAR <= 0)[:FEW] & (FAR >= -9)[:FEW]), (),
    ),
    "few queries at the end": (
        lambda: (qkv.Causal("end"), qkv.ALiBi(SLOPES)),
        lambda s: jnp.where(
            CAUSAL[-FEW:], s - SLOPES[:, None, None] * jnp.abs(FAR[-FEW:]), -jnp.inf
        ), (),
    ),
    "learned scales": (  # In parts of 64, which have gradients of the size of others.
        lambda scales: (qkv.Causal(),),
        lambda s, scales: forbidding(CAUSAL)(s * scales[:, None, None] / 64 * DIM**0.5),
        (np.array([6.0, 20.0, 24.0, 50.0]),),
    ),
    "no key": (lambda: (~qkv.SlidingWindow(39, None),), forbidding(FAR < -39), ()),
}  # fmt: skip


def definition(case: str, q: Any, k: Any, v: Any, *learned: Any) -> tuple[Any, Any]:
    """The formula on whole matrices."""
    if case == "rope":
        q, k = rotated(q), rotated(k)
    k, v = (jnp.repeat(x, 2, axis=1) for x in (k, v))
    scores = CASES[case][1](q @ k.mT * DIM**-0.5, *learned)
    largest = jnp.maximum(jax.lax.stop_gradient(scores.max(-1, keepdims=True)), -1e30)
    powers = jnp.exp(scores - largest)
    total = powers.sum(-1, keepdims=True)
    some = total > 0
    weights = powers / jnp.where(some, total, 1)
    lse = jnp.where(some, jnp.log(jnp.where(some, total, 1)) + largest, 0)
    return weights @ v, lse[..., 0]


def check(case: str, dtype: Any) -> float:
    """The largest error of output, lse and gradients."""
    rng = np.random.default_rng(0)
    shapes = (HEADS, HEADS // 2, HEADS // 2)
    arrays = [jnp.asarray(rng.normal(size=(2, h, LENGTH, DIM)), dtype) for h in shapes]
    q_len = FEW if "few" in case else LENGTH
    arrays[0] = arrays[0][:, :, :q_len]
    learned = [jnp.asarray(x, dtype) for x in CASES[case][2]]
    d_out = jnp.asarray(rng.normal(size=(2, HEADS, q_len, DIM)), dtype)
    d_lse = jnp.asarray(rng.normal(size=(2, HEADS, q_len)), dtype)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    rows = P(None, None, "rows")

    def ring(q: Any, k: Any, v: Any, *learned: Any) -> Any:
        variants = CASES[case][0](*learned)
        scale = learned[0] / 64 if case == "learned scales" else None
        out, lse = qkv.jax.ring_attention(
            q, k, v, *variants, axis_name="rows", scale=scale, return_lse=True
        )
        return out, jnp.where(lse > -jnp.inf, lse, 0)

    specs = (rows,) * 3 + (P(),) * len(learned)
    spread = jax.shard_map(ring, mesh=mesh, in_specs=specs, out_specs=(rows, rows))

    def with_gradients(function: Any, times: int = 1) -> Any:
        def total(*given: Any) -> Any:
            out, lse = function(*given)
            return (out * d_out).sum() + (lse * d_lse).sum(), (out, lse)

        places = tuple(range(3 + len(learned)))
        derived = jax.jit(jax.value_and_grad(total, argnums=places, has_aux=True))
        return [derived(*arrays, *learned) for _ in range(times)]

    found, again = with_gradients(spread, times=2)
    (right,) = with_gradients(lambda *given: definition(case, *given))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        assert (np.asarray(one) == np.asarray(other)).all(), "other bits"
    errors = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), found, right)
    return max(jax.tree.leaves(errors[0][1]) + jax.tree.leaves(errors[1]))


def main() -> None:
    assert len(jax.devices()) == 4
    for case in sys.argv[1:]:
        print(case, check(case, jnp.float32), flush=True)
    try:
        mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
        x = jnp.ones((8, 4))
        jax.shard_map(
            lambda x: qkv.jax.ring_attention(x, x, x, qkv.KeyLengths([3]), axis_name="rows"),
            mesh=mesh, in_specs=P("rows"), out_specs=P("rows"),
        )(x)  # fmt: skip
    except qkv.UnsupportedError as error:
        print(error.fact)


if __name__ == "__main__":
    main()
