"""The function of the migration page serves layers of Flax as their own one does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv

pytest.importorskip("jax", minversion="0.10", reason="Flax computes with JAX")
pytest.importorskip("flax", reason="compared with layers of Flax")

import jax
import jax.numpy as jnp
from flax import linen, nnx

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"


@pytest.fixture(scope="module")
def attention_fn() -> Callable[..., Any]:
    section = PAGE.read_text(encoding="utf-8").partition("## Flax")[2]
    block = re.search(r"```python compare\n(.*?)```", section, re.DOTALL)
    assert block is not None
    scope: dict[str, Any] = {"qkv": qkv}
    exec(compile(block[1], PAGE.name, "exec"), scope)
    given: Callable[..., Any] = scope["attention_fn"]
    return given


def layers(attention_fn: Callable[..., Any], **options: Any) -> list[Any]:
    """A layer with Flax's own attention, and the same one with ours."""
    options = {"num_heads": 4, "in_features": 24, "qkv_features": 32, "decode": False, **options}
    own = nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(0))
    return [own, nnx.MultiHeadAttention(**options, attention_fn=attention_fn, rngs=nnx.Rngs(0))]


def tokens(*batch: int) -> Any:
    return jax.random.normal(jax.random.key(1), (*batch, 7, 24))


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "num_kv_heads"), [((), None), ((2, 3), 2)])
def test_outputs_and_gradients(
    attention_fn: Callable[..., Any], batch: tuple[int, ...], num_kv_heads: int | None
) -> None:
    x = tokens(*batch)
    mask, found = nnx.make_causal_mask(x[..., 0]), []

    def loss(layer: Any) -> Any:
        return (layer(x, mask=mask) ** 2).sum()

    for layer in layers(attention_fn, num_kv_heads=num_kv_heads):
        gradients = nnx.jit(nnx.grad(loss))(layer)
        found.append([layer(x), layer(x, mask=mask), *jax.tree.leaves(gradients)])
    for theirs, ours in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
def test_decoding(attention_fn: Callable[..., Any]) -> None:
    x = tokens(2)
    theirs, ours = layers(attention_fn, decode=True)
    for layer in (theirs, ours):
        layer.init_cache(x.shape)
    for n in range(x.shape[1]):
        token = x[:, n : n + 1]
        np.testing.assert_allclose(ours(token), theirs(token), atol=1e-5)


@pytest.mark.slow
def test_decoding_as_the_layer_was_trained(attention_fn: Callable[..., Any]) -> None:
    """The flag of training may stay; Flax's own attention then sees the first key alone."""
    x = tokens(2)
    whole, _ = layers(attention_fn)
    _, layer = layers(attention_fn, decode=True)
    layer.init_cache(x.shape)
    steps = [layer(x[:, n : n + 1], is_causal=True) for n in range(x.shape[1])]
    expected = whole(x, is_causal=True)
    np.testing.assert_allclose(jnp.concat(steps, axis=1), expected, atol=1e-5)


@pytest.mark.slow
def test_layers_of_linen(attention_fn: Callable[..., Any]) -> None:
    x = tokens(2)
    mask = linen.make_causal_mask(x[..., 0])
    theirs = linen.MultiHeadDotProductAttention(num_heads=4, qkv_features=32)
    ours = linen.MultiHeadDotProductAttention(
        num_heads=4, qkv_features=32, attention_fn=attention_fn
    )
    weights = theirs.init(jax.random.key(0), x)
    np.testing.assert_allclose(
        ours.apply(weights, x, mask=mask), theirs.apply(weights, x, mask=mask), atol=1e-5
    )


@pytest.mark.slow
def test_dropout_has_the_mean_of_no_dropout(attention_fn: Callable[..., Any]) -> None:
    x = tokens(2)
    _, layer = layers(attention_fn, dropout_rate=0.5)
    outputs = [layer(x, rngs=nnx.Rngs(seed), deterministic=False) for seed in range(100)]
    assert float(jnp.abs(outputs[0] - outputs[1]).max()) > 0.01
    np.testing.assert_array_equal(outputs[0], layer(x, rngs=nnx.Rngs(0), deterministic=False))
    expected = layer(x, deterministic=True)
    spread = float(jnp.std(jnp.stack(outputs), axis=0).max())
    np.testing.assert_allclose(sum(outputs) / 100, expected, atol=5 * spread / 10)
