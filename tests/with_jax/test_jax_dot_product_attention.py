"""The drop-in against `jax.nn.dot_product_attention`, argument by argument."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="compared with jax 0.10 or later")

import jax
import jax.numpy as jnp

import qkv
import qkv.jax

B, T, S, N, K, H = 2, 7, 9, 4, 2, 8


def arrays(seed: int = 0, q_len: int = T, dtype: Any = jnp.float32) -> list[Any]:
    rng = np.random.default_rng(seed)
    shapes = (B, q_len, N, H), (B, S, K, H), (B, S, K, H)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def random(*shape: int, seed: int = 1) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def mask(*shape: int) -> Any:
    """A random mask with a key for every row."""
    return (random(*shape, seed=2) < 0.5).at[..., 0].set(True)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "scale": {"scale": 0.3},
    "bias": {"bias": random(B, N, T, S)},
    "bias of heads, mask of keys": {"bias": random(1, N, 1, S), "mask": mask(B, 1, 1, S)},
    "bias of three dimensions, mask of two": {"bias": random(N, T, S), "mask": mask(T, S)},
    "bias of whole numbers": {"bias": jnp.arange(S, dtype=jnp.int32)[None, None, None]},
    "bias of 16 bits": {"bias": random(B, 1, T, S).astype(jnp.bfloat16)},
    "mask": {"mask": mask(B, N, T, S)},
    "causal": {"is_causal": True},
    "key lengths": {"key_value_seq_lengths": jnp.array([9, 4], jnp.int32)},
    "key lengths beyond": {"key_value_seq_lengths": jnp.array([12, 4], jnp.int32)},
    "query lengths": {"query_seq_lengths": jnp.array([7, 3], jnp.int32)},
    "window": {"local_window_size": 2},
    "window of one side": {"local_window_size": (3, 0)},
    "all": {
        "bias": random(B, N, T, S),
        "mask": mask(B, 1, T, S),
        "scale": 0.5,
        "is_causal": True,
        "query_seq_lengths": jnp.array([7, 5], jnp.int32),
        "key_value_seq_lengths": jnp.array([8, 9], jnp.int32),
        "local_window_size": (20, 1),
    },
}


DIFFERENTIATED = ("bias", "all")
"""Cases for which a backward kernel is made, too."""


def close(got: Any, right: Any, atol: float = 3e-6) -> None:
    assert got.shape == right.shape
    assert got.dtype == right.dtype
    np.testing.assert_allclose(
        np.asarray(got, np.float64), np.asarray(right, np.float64), rtol=0, atol=atol
    )


def theirs(*args: Any, **keywords: Any) -> Any:
    return jax.nn.dot_product_attention(*args, **keywords, implementation="xla")


def jitted(kwargs: dict[str, Any]) -> Any:
    return jax.jit(lambda q, k, v: qkv.jax.dot_product_attention(q, k, v, **kwargs))


@pytest.mark.slow
@pytest.mark.sampled("name", list(ARGUMENTS), one_in=3)
def test_values(name: str) -> None:
    kwargs = ARGUMENTS[name]
    q, k, v = arrays()
    bias = kwargs.get("bias")
    rounding = 0.01 if bias is not None and bias.dtype == jnp.bfloat16 else 0.0
    right = theirs(q, k, v, **kwargs)
    close(jitted(kwargs)(q, k, v), right, 3e-6 + rounding)
    close(qkv.jax.dot_product_attention(q, k, v, **kwargs), right, 3e-6 + rounding)


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_of_arguments(name: str) -> None:
    q, k, v = arrays()
    kwargs, along = ARGUMENTS[name], random(B, T, N, H, seed=3)
    bias = kwargs.get("bias", jnp.zeros((1, 1, 1, S)))
    rest = {name: value for name, value in kwargs.items() if name != "bias"}

    def gradients(f: Any) -> Any:
        return jax.grad(lambda *a: (f(*a, **rest) * along).sum(), argnums=(0, 1, 2, 3))

    found = jax.jit(gradients(qkv.jax.dot_product_attention))(q, k, v, bias)
    jax.tree.map(
        lambda got, exact: close(got, exact, 1e-5), found, gradients(theirs)(q, k, v, bias)
    )


@pytest.mark.sampled("dtype", ["float64", "bfloat16", "float16"], one_in=3)
def test_dtypes(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        q, k, v = arrays(dtype=dtype)
        found = qkv.jax.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
        right = theirs(q, k, v, is_causal=True, return_residual=True)
        # In float64, JAX's own softmax is in float32.
        atol = {"float64": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
        jax.tree.map(lambda got, exact: close(got, exact, atol), found, right)


@pytest.mark.slow
def test_without_batch() -> None:
    q, k, v = (a[0] for a in arrays())
    found = qkv.jax.dot_product_attention(q, k, v, mask=mask(N, T, S), return_residual=True)
    right = theirs(q, k, v, mask=mask(N, T, S), return_residual=True)
    jax.tree.map(close, found, right)


def test_residual_has_no_gradient() -> None:
    q, k, v = arrays()

    def f(q: Any) -> Any:
        return qkv.jax.dot_product_attention(q, k, v, return_residual=True)[1].sum()

    assert not jax.grad(f)(q).any()


def test_ranks_are_not_promoted() -> None:
    """The function of JAX works too where JAX refuses arrays of unlike numbers of dimensions."""
    q, k, v = (jnp.ones((2, 7, 4, 8)) for _ in range(3))
    lengths = jnp.array([7, 5], jnp.int32)
    with jax.numpy_rank_promotion("raise"):
        for function in (qkv.jax.dot_product_attention, jax.nn.dot_product_attention):
            assert function(q, k, v, query_seq_lengths=lengths).shape == q.shape
        for layout in ("bhld", "blhd"):
            heads = q.shape[1 if layout == "bhld" else 2]
            out = qkv.attention(q, k, v, scale=jnp.ones(heads), layout=layout)
            assert out.shape == q.shape


def test_traced_scale_has_a_gradient() -> None:
    q, k, v = arrays()
    found, right = (
        jax.jit(jax.value_and_grad(lambda s, f=f: f(q, k, v, scale=s).sum()))(0.4)
        for f in (qkv.jax.dot_product_attention, theirs)
    )
    jax.tree.map(lambda got, exact: close(got, exact, 1e-4), found, right)


def test_vmap() -> None:
    q, k, v = (a.reshape(1, 2, *a.shape[1:]).swapaxes(0, 1) for a in arrays())
    found, right = (
        jax.vmap(lambda *a, f=f: f(*a, is_causal=True))(q, k, v)
        for f in (qkv.jax.dot_product_attention, theirs)
    )
    close(found, right)


@pytest.mark.slow
def test_the_one_difference() -> None:
    """A row that may see nothing: 0 here, the mean of all values there; NaN behind a mask."""
    q, k, v = arrays()
    none = jnp.ones((1, 1, T, S), bool).at[..., 3, :].set(False)
    found, lse = qkv.jax.dot_product_attention(q, k, v, mask=none, return_residual=True)
    right = theirs(q, k, v, mask=none)
    assert not found[:, 3].any()
    assert jnp.isneginf(lse[:, 3]).all()
    close(right[:, 3, 0], v[:, :, 0].mean(1))
    rows = np.array([0, 1, 2, 4, 5, 6])
    close(found[:, rows], right[:, rows])
    spoilt = v.at[:, 8].set(jnp.nan)
    lens = jnp.array([8, 8], jnp.int32)
    assert jnp.isfinite(
        qkv.jax.dot_product_attention(q, k, spoilt, key_value_seq_lengths=lens)
    ).all()
    assert jnp.isnan(theirs(q, k, spoilt, key_value_seq_lengths=lens)).any()


def test_a_named_implementation_is_jax() -> None:
    q, k, v = arrays()
    found = qkv.jax.dot_product_attention(q, k, v, implementation="xla", return_residual=True)
    jax.tree.map(np.testing.assert_array_equal, found, theirs(q, k, v, return_residual=True))
    with pytest.raises(ValueError, match="flash"):
        qkv.jax.dot_product_attention(q, k, v, implementation="flash")


def test_signature() -> None:
    """Every parameter that JAX has, in its place; one more where JAX is older."""

    def of(f: Any) -> dict[str, Any]:
        return {name: (p.kind, p.default) for name, p in inspect.signature(f).parameters.items()}

    ours, right = of(qkv.jax.dot_product_attention), of(jax.nn.dot_product_attention)
    assert ours == {**right, "return_residual": (inspect.Parameter.KEYWORD_ONLY, False)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": jnp.zeros((B, S, K, H), jnp.bfloat16)}, "different dtypes"),
        ({"value": jnp.zeros((B, S, K, 5))}, "one shape"),
        ({"query": jnp.zeros((3, T, N, H))}, "their batch"),
        ({"query": jnp.zeros((1, B, T, N, H))}, "more than 4 dimensions"),
        ({"query": jnp.zeros((B, T, 3, H))}, "not a multiple"),
        ({"key_value_seq_lengths": jnp.array([1.0, 2.0])}, "float32"),
        ({"query_seq_lengths": jnp.array([1], jnp.int32)}, "batch is 2"),
        ({"bias": random(B, 3, T, S)}, "does not broadcast"),
        ({"local_window_size": (-1, 2)}, "left=-1"),
        ({"local_window_size": (1, 2, 3)}, "has 3 numbers"),
    ],
)
def test_what_does_not_fit_is_a_value_error(change: dict[str, Any], message: str) -> None:
    """JAX raises the same; the exceptions of qkv are ValueErrors."""
    arguments = {**dict(zip(("query", "key", "value"), arrays(), strict=True)), **change}
    with pytest.raises(ValueError, match=message):
        qkv.jax.dot_product_attention(**arguments)
    with pytest.raises(TypeError, match="complex64"):
        qkv.jax.dot_product_attention(*arrays(), bias=jnp.zeros((1, 1, 1, S), jnp.complex64))
    with pytest.raises(TypeError, match="float32, not bool"):
        qkv.jax.dot_product_attention(*arrays(), mask=random(1, 1, T, S))
    with pytest.raises(qkv.DTypeError, match="int32, not bool") as caught:
        qkv.jax.dot_product_attention(*arrays(), mask=jnp.ones((1, 1, T, S), jnp.int32))
    assert "bias=mask" in caught.value.action
    assert "Bias(" not in caught.value.action


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "mask"])
def test_what_is_no_array_is_named(name: str) -> None:
    given = {**dict(zip(("query", "key", "value"), arrays(), strict=True)), name: qkv.Causal()}
    with pytest.raises(qkv.DTypeError, match=f"^{name} is a Causal, not an array"):
        qkv.jax.dot_product_attention(**given)
