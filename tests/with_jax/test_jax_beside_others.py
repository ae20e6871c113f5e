"""JAX arrays in one call with NumPy's and torch's: the output is like the query."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="compared with jax 0.10 or later")

import jax
import jax.numpy as jnp

import qkv
from qkv.testing import truth

RNG = np.random.default_rng(0)
ARRAYS = [RNG.normal(size=(2, 9, 8)).astype(np.float32) for _ in range(3)]
BIAS = RNG.normal(size=(9, 9)).astype(np.float32)
RIGHT = truth(*ARRAYS, [BIAS, qkv.Causal()]).out


def near(got: Any, right: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(right), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kinds", list(product("nj", repeat=4)), ids="".join)
def test_the_output_is_like_the_query(kinds: tuple[str, ...]) -> None:
    arrays = zip(kinds, (*ARRAYS, BIAS), strict=True)
    given = [jnp.asarray(array) if kind == "j" else array for kind, array in arrays]
    found = qkv.attention(*given, qkv.Causal())
    assert isinstance(found, jax.Array if kinds[0] == "j" else np.ndarray)
    near(found, RIGHT)


@pytest.mark.parametrize("role", ["key", "value", "an array of Bias"])
def test_what_jax_traces_asks_for_a_query_of_jax(role: str) -> None:
    q, k, v = ARRAYS

    def call(x: Any) -> Any:
        given = {"key": (q, x, v), "value": (q, k, x), "an array of Bias": (q, k, v)}[role]
        return qkv.attention(*given, *((qkv.Bias(x[0, :, :1]),) if "Bias" in role else ()))

    message = f"jax differentiates or traces {role}.* array of numpy(.|\n)*Pass query as an array"
    mapped = jax.vmap(call)
    for transformed in (
        jax.jit(call),
        jax.grad(lambda x: call(x).sum()),
        lambda x: mapped(x[None]),
    ):
        with pytest.raises(qkv.UnsupportedError, match=message):
            transformed(jnp.asarray(k))


def test_tensors_beside_jax_arrays() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = ARRAYS
    tensor = torch.from_numpy
    found = qkv.attention(
        tensor(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(BIAS), qkv.Causal()
    )
    assert isinstance(found, torch.Tensor)
    near(found, RIGHT)
    query, bias = (tensor(a.copy()).requires_grad_() for a in (q, BIAS))
    qkv.attention(query, jnp.asarray(k), v, bias, qkv.Causal()).sum().backward()
    right = qkv.vjp(q, k, v, given := qkv.Bias(BIAS), qkv.Causal())[1](np.ones_like(q), wrt=[given])
    near(query.grad, right.query)
    near(bias.grad, right.of(given))

    def jitted(x: Any) -> Any:
        return qkv.attention(x, tensor(k), tensor(v), BIAS, qkv.Causal())

    for f in (jitted, jax.jit(jitted)):
        found = f(jnp.asarray(q))
        assert isinstance(found, jax.Array)
        near(found, RIGHT)
    for f in (jax.jit, lambda f: f):
        with pytest.raises(qkv.UnsupportedError, match="torch differentiates or traces key"):
            f(lambda x: qkv.attention(x, query, v))(jnp.asarray(q))
    with pytest.raises(qkv.UnsupportedError, match="jax differentiates or traces"):
        jax.jit(lambda x: qkv.attention(tensor(q), x, x))(jnp.asarray(k))


def test_a_prepared_call_takes_arrays_of_other_libraries_beside_its_query() -> None:
    q, k, v = ARRAYS
    prepared = qkv.prepare(q, k, v, qkv.Causal(), BIAS)
    near(prepared(q, jnp.asarray(k), v), RIGHT)
    for call in (prepared, jax.jit(prepared)):
        with pytest.raises(qkv.UnsupportedError, match="arrays of jax are compiled by jax"):
            call(jnp.asarray(q), k, v)
    torch = pytest.importorskip("torch")
    query = torch.from_numpy(q.copy()).requires_grad_()
    found = prepared(query, jnp.asarray(k), torch.from_numpy(v))
    near(found.detach(), RIGHT)
    found.sum().backward()
    near(query.grad, qkv.vjp(q, k, v, BIAS, qkv.Causal())[1](np.ones_like(q)).query)


def test_frequencies_of_numpy_are_not_rounded_to_32_bits() -> None:
    """A frequency of float32 turns a row at distance 10^5 by up to 0.006 radians too far."""
    q, k, v = ARRAYS
    for rope in (qkv.RoPE.yarn(8, 4.0, 2048), qkv.RoPE(inv_freq=np.array([1.0, 0.7, 0.3, 0.1]))):

        def far(x: Any, rope: Any = rope) -> Any:
            return qkv.attention(x, k, v, rope, q_offset=10**5)

        np.testing.assert_array_equal(jax.jit(far)(jnp.asarray(q)), far(q))
        _, pullback = qkv.vjp(q, k, v, rope, q_offset=10**5)
        found = jax.grad(lambda x: far(x).sum())(jnp.asarray(q))
        near(found, pullback(np.ones_like(q)).query)


def test_whole_numbers_of_numpy_are_not_cut_to_32_bits() -> None:
    """JAX keeps the last 32 bits, so that segments 0 and 2^32 were one."""
    q, k, v = ARRAYS

    def call(x: Any, ids: np.ndarray) -> Any:
        return qkv.attention(x, k, v, qkv.Segments(ids))

    small, large = np.repeat([0, 1], [4, 5]), np.repeat([0, 2**32], [4, 5])
    near(jax.jit(lambda x: call(x, small))(jnp.asarray(q)), call(q, large))
    with pytest.raises(qkv.DTypeError, match=r"an array of Segments .* from 0 to 4294967296"):
        jax.jit(lambda x: call(x, large))(jnp.asarray(q))


@pytest.mark.parametrize("dtype", [">f4", np.longdouble, object])
def test_types_that_jax_lacks_are_named(dtype: Any) -> None:
    q, k, v = ARRAYS
    for place, role in ((1, "key"), (3, "bias|a variant")):
        given: list[Any] = [q, k, v, BIAS]
        given[place] = given[place].astype(dtype)
        with pytest.raises(qkv.DTypeError, match=f"({role}) has dtype .* JAX does not have"):
            jax.jit(lambda x, given=given: qkv.attention(x, *given[1:]))(jnp.asarray(q))


def test_the_mask_of_a_masked_array_is_not_lost_while_jax_traces() -> None:
    q, k, v = ARRAYS
    hidden = np.ma.masked_array(BIAS, BIAS > 0)
    with pytest.raises(qkv.DTypeError, match="bias is a masked array"):
        jax.jit(lambda x: qkv.attention(x, k, v, hidden))(jnp.asarray(q))
