"""JAX differentiates through `merge`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qkv


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_gradients_are_those_over_all_keys(layout) -> None:
    shapes = [(2, 3, n, 8) for n in (5, 11, 11)]
    inputs = [normal(*shape, seed=n) for n, shape in enumerate(shapes)]
    along = normal(2, 3, 5, 8, seed=9)

    def turned(array):
        return array.swapaxes(-3, -2) if layout == "blhd" else array

    def joined(query, key, value):
        parts = [
            qkv.attention(
                *map(turned, (query, key[:, :, rows], value[:, :, rows])),
                layout=layout, return_lse=True,
            )
            for rows in (slice(0, 4), slice(4, 11))
        ]  # fmt: skip
        out, lse = qkv.merge(*parts, layout=layout)
        return (turned(out) * along).sum() + jnp.sin(lse).sum()

    def written_out(query, key, value):
        scores = query @ key.swapaxes(-1, -2) / np.sqrt(8)
        lse = jax.nn.logsumexp(scores, -1)
        return ((jax.nn.softmax(scores) @ value) * along).sum() + jnp.sin(lse).sum()

    found, expected = (jax.value_and_grad(f, (0, 1, 2))(*inputs) for f in (joined, written_out))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_means_of_the_largest_number_are_finite_and_have_gradients() -> None:
    largest = jnp.finfo(jnp.float32).max
    lses = 3 * normal(3, 300)
    outs = jnp.full((3, 300, 1), largest)

    def merged(outs):
        return qkv.merge(*zip(outs, lses, strict=True))[0]

    assert jnp.isfinite(jax.jit(merged)(outs)).all()
    gradient = jax.jit(jax.grad(lambda outs: (merged(outs) / largest).sum() * largest))(outs)
    np.testing.assert_allclose(gradient[..., 0], jax.nn.softmax(lses, 0), atol=2e-6)
