"""`jax_debug_nans` stops at NaN that are there, and at none that mean "not known"."""

import jax
import jax.numpy as jnp
import pytest

import qkv


@pytest.mark.slow
def test_finite_gradients_pass() -> None:
    x = jnp.linspace(-1.0, 1.0, 96).reshape(1, 2, 6, 8)
    with jax.debug_nans(True):
        found = jax.grad(lambda q: qkv.attention(q, x, x).sum())(x)
        loss = jax.value_and_grad(lambda q: jnp.log(-1.0 - jnp.abs(qkv.attention(q, x, x))).sum())
        with pytest.raises(FloatingPointError, match="log"):
            jax.jit(loss)(x)
    right = jax.grad(lambda q: (jax.nn.softmax(q @ x.swapaxes(-1, -2) * 8**-0.5) @ x).sum())(x)
    assert jnp.allclose(found, right, atol=1e-5)
