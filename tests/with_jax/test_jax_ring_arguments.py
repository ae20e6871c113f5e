"""What `ring_attention` refuses while JAX traces: XLA ends the process where one device fails."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import qkv
import qkv.jax

ROWS = P(None, "rows")
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 4)), jnp.float32)


def ring(query: Any, key: Any, *variants: Any, **options: Any) -> Any:
    def attend(query: Any, key: Any) -> Any:
        return qkv.jax.ring_attention(query, key, key, *variants, axis_name="rows", **options)

    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    return jax.shard_map(attend, mesh=mesh, in_specs=ROWS, out_specs=ROWS)(query, key)


VARIANTS = (
    qkv.Causal(),
    ~qkv.SlidingWindow(3, 3),
    qkv.ALiBi(np.array([0.5, 0.25])),
    qkv.RoPE(inv_freq=np.ones(2)),
    qkv.Causal() & qkv.Prefix(3),
)


@pytest.mark.parametrize("variant", VARIANTS, ids=repr)
def test_unequal_lengths_and_nothing_said(variant: Any) -> None:
    with pytest.raises(qkv.AmbiguityError, match="q_len=3 differs from kv_len=8"):
        jax.eval_shape(lambda: ring(X[:, :3], X, variant))


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        (qkv.Causal("start"), {"q_offset": "end"}),
        (qkv.Causal("end") & qkv.Causal("start"), {}),
        (qkv.Causal("end"), {"q_offset": 4}),
    ],
    ids=repr,
)
def test_two_statements_that_differ(variant: Any, options: dict[str, Any]) -> None:
    with pytest.raises(qkv.AmbiguityError, match="two statements"):
        jax.eval_shape(lambda: ring(X[:, :3], X, variant, **options))


@pytest.mark.parametrize("q_offset", ["middle", 1.0, np.array([1, 2])], ids=repr)
def test_no_offset(q_offset: Any) -> None:
    with pytest.raises(qkv.ArgumentError, match="q_offset"):
        jax.eval_shape(lambda: ring(X, X, qkv.Causal(), q_offset=q_offset))


@pytest.mark.parametrize(
    ("variant", "q_offset", "first"),
    [
        (qkv.Causal("start"), None, 0),
        (qkv.Causal("end"), None, 5),
        (qkv.Causal(), "end", 5),
        (~~qkv.Causal("end"), 5, 5),
        (qkv.Causal(), 2, 2),
    ],
    ids=repr,
)
def test_where_queries_stand(variant: Any, q_offset: Any, first: int) -> None:
    q, k = np.asarray(X, np.float64)[:, :3], np.asarray(X, np.float64)
    allowed = np.arange(8) <= first + np.arange(3)[:, None]
    weights = np.exp(q @ k.swapaxes(-1, -2) / 2) * allowed
    expected = weights / weights.sum(-1, keepdims=True) @ k
    out = ring(X[:, :3], X, variant, q_offset=q_offset)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_a_scale_that_is_no_number() -> None:
    with pytest.raises(qkv.ArgumentError, match="scale='a'"):
        jax.eval_shape(lambda: ring(X, X, qkv.Causal(), scale="a"))


def test_a_scale_that_is_differentiated() -> None:
    def total(scale: Any) -> Any:
        return (ring(X, X, scale=scale) ** 2).sum()

    def definition(scale: Any) -> Any:
        return ((jax.nn.softmax(scale * X @ X.mT) @ X) ** 2).sum()

    found, expected = (jax.jit(jax.grad(f))(0.4) for f in (total, definition))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_rows_of_16_bits_where_jax_promotes_nothing() -> None:
    rows = X.astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        assert ring(rows, rows, qkv.Causal()).dtype == jnp.bfloat16


def test_no_query_rows() -> None:
    """JAX once said that types of a loop do not match."""
    value, pull = jax.vjp(lambda query: ring(query, X, qkv.Causal(), q_offset="end"), X[:, :0])
    assert value.shape == pull(value)[0].shape == (2, 0, 4)
