"""JAX may be told to refuse operands of different types or dimensions; results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qkv

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 8)), jnp.bfloat16)
SCALES = jnp.array([0.5, 0.25], jnp.float32)
FREQUENCIES = jnp.array([1.0, 0.5, 0.25])


def attended(x: Any, scale: Any) -> Any:
    return qkv.attention(x, x, x, qkv.Causal(), scale=scale)


CALLS: dict[str, Callable[[], Any]] = {
    "scale": lambda: jax.jit(attended)(X, SCALES[0]),
    "scales of heads": lambda: attended(X, SCALES),
    "scale of a matrix": lambda: attended(X[0], SCALES[:1]),
    "gradient of scales": lambda: jax.grad(
        lambda scale: attended(X, scale).sum().astype(jnp.float32)
    )(SCALES),
    "rotate": lambda: qkv.RoPE().rotate(X, np.arange(6)),
    "rotate by one": lambda: qkv.RoPE(layout="interleaved").rotate(X, 3),
    "rotate, traced": lambda: jax.jit(qkv.RoPE(inv_freq=FREQUENCIES).rotate)(X, jnp.arange(6)),
    "gradient of rotate": lambda: jax.grad(
        lambda x: (qkv.RoPE().rotate(x, jnp.arange(6)) ** 2).sum()
    )(X),
    "sinusoidal": lambda: qkv.SinusoidalPositions(8)(X),
    "learned": lambda: qkv.LearnedPositions(jnp.full((6, 8), 0.3))(X),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("refused", ["types", "dimensions"])
def test_nothing_is_promoted_but_by_qkv(name: str, refused: str) -> None:
    expected = CALLS[name]()
    strict = jax.numpy_dtype_promotion("strict")
    with strict if refused == "types" else jax.numpy_rank_promotion("raise"):
        found = CALLS[name]()
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
