"""What JAX users see when something does not fit, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="compared with jax 0.10 or later")

import jax
import jax.export
import jax.numpy as jnp

import qkv

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5, 4)), jnp.float32)


def test_shapes_are_checked_while_jax_traces() -> None:
    with pytest.raises(qkv.ShapeError, match="kv_len=5 and value has kv_len=4"):
        jax.jit(qkv.attention)(X, X, X[:, :, :4])
    with pytest.raises(qkv.ShapeError, match="does not broadcast"):
        jax.eval_shape(lambda b: qkv.attention(X, X, X, b), jnp.zeros((4, 4)))
    with pytest.raises(qkv.AmbiguityError, match="where do the queries stand"):
        jax.jit(lambda q: qkv.attention(q, X, X, qkv.Causal()))(X[:, :, :2])
    with pytest.raises(qkv.ArgumentError, match="no backend 'nobody'"):
        jax.jit(lambda q: qkv.attention(q, X, X, backend="nobody"))(X)


def test_integers_are_refused_while_jax_traces() -> None:
    with pytest.raises(qkv.DTypeError, match="int32"):
        jax.jit(lambda b: qkv.attention(X, X, X, b))(jnp.zeros((5, 5), jnp.int32))


def test_what_values_tell_is_an_error_of_jax() -> None:
    """Raised inside of XLA, with the message of qkv; the process goes on."""
    f = jax.jit(lambda n: qkv.attention(X, X, X, qkv.KeyLengths(n)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="kv_lens runs from 1 to 99; kv_len=5"):
        jax.block_until_ready(f(jnp.array([1, 99])))
    assert f(jnp.array([1, 5])).shape == X.shape
    with pytest.raises(qkv.ShapeError, match="kv_lens runs from 1 to 99"):
        qkv.attention(X, X, X, qkv.KeyLengths(jnp.array([1, 99])))


class Speechless(Exception):
    def __str__(self) -> str:
        raise UnicodeError("no words")


def test_any_exception_in_the_callback_is_an_error_of_jax(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from qkv.bridges.jax import operations as jax_operations

    f = jax.jit(lambda x: qkv.attention(x, x, x))
    for error, seen in (
        (MemoryError("too\0much"), "RESOURCE_EXHAUSTED: qkv: MemoryError: too much"),
        (KeyboardInterrupt(), "CANCELLED: qkv: interrupted"),
        (ZeroDivisionError("why"), "INTERNAL: qkv: ZeroDivisionError: why"),
        (ValueError("half \ud800 gone"), r"INTERNAL: qkv: ValueError: half \? gone"),
        (qkv.ShapeError("half \ud800 gone"), r"INVALID_ARGUMENT: qkv: half \? gone"),
        (Speechless(), "INTERNAL: qkv: Speechless: an error whose message cannot be read"),
    ):

        def fail(*_: Any, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(jax_operations, "_forward", fail)
            with pytest.raises(jax.errors.JaxRuntimeError, match=seen):
                jax.block_until_ready(f(X))
    assert f(X).shape == X.shape


def test_looking_needs_values() -> None:
    for look in (qkv.inspect, qkv.plan, qkv.vjp):
        with pytest.raises(qkv.UnsupportedError, match=r"query is traced \(float32\[2,3,5,4\]\)"):
            jax.jit(lambda x, look=look: look(x, x, x) and x)(X)


def test_gradients_that_do_not_exist_are_refused() -> None:
    turns = jnp.array([0.5, 0.25])
    with pytest.raises(qkv.UnsupportedError, match="inv_freq"):
        jax.grad(lambda f: qkv.attention(X, X, X, qkv.RoPE(inv_freq=f)).sum())(turns)
    assert jax.jit(lambda f: qkv.attention(X, X, X, qkv.RoPE(inv_freq=f)))(turns).shape == X.shape
    found = jax.jit(lambda s: qkv.attention(X, X, X, scale=s))(0.5)
    np.testing.assert_array_equal(found, qkv.attention(X, X, X, scale=0.5))


def test_truth_values_are_no_scales() -> None:
    for scale in (jnp.array(True), jnp.array([True, False, True])):
        with pytest.raises(qkv.QkvError, match="scale"):
            jax.jit(lambda s: qkv.attention(X, X, X, scale=s))(scale)


def test_a_scale_may_be_learned() -> None:
    def dense(scale: jax.Array) -> jax.Array:
        scores = scale * jnp.einsum("...id,...jd->...ij", X, X)
        return (jax.nn.softmax(scores, axis=-1) @ X * jnp.cos(X)).sum()

    def ours(scale: jax.Array) -> jax.Array:
        return (qkv.attention(X, X, X, scale=scale) * jnp.cos(X)).sum()

    np.testing.assert_allclose(jax.grad(ours)(0.5), jax.grad(dense)(0.5), rtol=1e-4)


def test_wide_numpy_arrays_are_not_rounded() -> None:
    wide = np.zeros(X.shape)
    with pytest.raises(qkv.DTypeError, match="key is a NumPy array of float64"):
        jax.jit(lambda q: qkv.attention(q, wide, wide))(X)
    with pytest.raises(qkv.DTypeError, match="different dtypes"):
        qkv.attention(X, wide, wide)


def test_keys_of_random_numbers_are_not_numbers() -> None:
    key = jax.random.key(0)

    def dropped(seed: Any) -> jax.Array:
        return qkv.attention(X, X, X, qkv.Dropout(0.5, seed))

    for call in (dropped, jax.jit(dropped), lambda key: jax.jit(qkv.attention)(X, key, X)):
        with pytest.raises(qkv.DTypeError, match=r"key<fry>[^$]*jax.random.bits"):
            call(key)
    seed = jax.random.bits(key)
    np.testing.assert_array_equal(jax.jit(dropped)(seed), dropped(int(seed)))


SQUARE = X[..., :4, :]
"""Fits as an operand and as a bias."""


@pytest.mark.parametrize(
    "call",
    [
        lambda given: qkv.attention(given, SQUARE, SQUARE),
        lambda given: jax.jit(lambda q: qkv.attention(q, given, SQUARE))(SQUARE),
        lambda given: qkv.inspect(SQUARE, SQUARE, given),
        lambda given: qkv.attention(SQUARE, SQUARE, SQUARE, qkv.Bias(given)),
        lambda given: jax.jit(lambda q: qkv.attention(q, q, q, qkv.Bias(given)))(SQUARE),
    ],
    ids=["query", "key under jit", "inspect", "bias", "bias under jit"],
)
def test_what_jax_defines_beside_arrays_is_no_array(call: Any) -> None:
    """Shapes, references and shardings are of JAX, and hold no values to compute with."""
    for given, action in (
        (jax.ShapeDtypeStruct(SQUARE.shape, SQUARE.dtype), "jax.eval_shape"),
        (jax.typeof(SQUARE), "Pass an array"),
        (jax.new_ref(SQUARE), "[...]"),
    ):
        with pytest.raises(qkv.DTypeError, match=r"is a .*, not an array") as caught:
            call(given)
        assert action in caught.value.action
    with pytest.raises(qkv.DTypeError, match="not an array"):
        qkv.attention(jax.sharding.PartitionSpec("rows"), SQUARE, SQUARE)


class Parameter:
    """An object that JAX takes for the array that it holds, as those of Flax are."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __jax_array__(self) -> Any:
        return self.held


@pytest.mark.parametrize("transform", [jax.jit, jax.grad], ids=["jit", "grad"])
@pytest.mark.parametrize("role", ["query", "bias"])
def test_parameters_are_not_arrays(role: str, transform: Any) -> None:
    def loss(array: Any) -> jax.Array:
        parameter = Parameter(array)
        query, bias = (parameter, SQUARE) if role == "query" else (SQUARE, parameter)
        return qkv.attention(query, SQUARE, SQUARE, qkv.Bias(bias)).sum()

    with pytest.raises(qkv.DTypeError, match="Parameter, not an array") as caught:
        transform(loss)(SQUARE)
    assert "jax.numpy.asarray(" in caught.value.action


def test_sizes_are_numbers() -> None:
    of_any_batch = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 3, 5, 4"), jnp.float32)
    with pytest.raises(qkv.UnsupportedError, match=r"query has the symbolic shape \(b, 3, 5, 4\)"):
        jax.export.export(jax.jit(lambda q: qkv.attention(q, q, q)))(of_any_batch)


def test_stored_rows() -> None:
    """Pages are read outside of jit, and refused inside."""
    pages = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3, 2, 4)), jnp.float32)
    paged = qkv.Paged(pages, jnp.array([[3, 0], [1, 2]]))
    whole = jnp.stack([jnp.concatenate([pages[a], pages[b]], 1) for a, b in ((3, 0), (1, 2))])
    found = qkv.attention(X, paged, paged)
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, qkv.attention(X, whole, whole), atol=1e-6)
    with pytest.raises(qkv.UnsupportedError, match="key is Paged"):
        jax.jit(lambda q: qkv.attention(q, paged, paged))(X)


def test_results_lie_where_jax_takes_them() -> None:
    """Results are taken without a copy: their memory begins at a multiple of 64 bytes."""
    from qkv.arrays import jax_arrays, library_of

    library = library_of(X, "x")
    seen = library.view(X, "x")
    assert seen.ctypes.data == X.unsafe_buffer_pointer()
    assert not seen.flags.writeable
    memory = np.arange(100, dtype=np.float32)
    at = -memory.ctypes.data % 64 // 4
    even, odd = memory[at : at + 64], memory[at + 1 : at + 65]
    assert library.restore(even).unsafe_buffer_pointer() == even.ctypes.data
    assert library.restore(odd).tolist() == odd.tolist()
    assert jax_arrays.aligned(odd).ctypes.data % 64 == 0
    record = qkv.inspect(X, X, X, qkv.Causal())
    assert isinstance(record.entropy, jax.Array)
    assert record.output.dtype == jnp.float32
    assert qkv.plan(X, X, X).backend


@pytest.mark.slow
def test_vjp_takes_jax_arrays() -> None:
    bias = qkv.Bias(jnp.zeros((5, 5)))
    out, pullback = qkv.vjp(X, X, X, bias, qkv.Causal())
    found = pullback(jnp.ones_like(out), wrt=[bias])
    right = jax.grad(lambda *a: qkv.attention(*a[:3], a[3], qkv.Causal()).sum(), (0, 1, 2, 3))(
        X, X, X, bias.array
    )
    for got, exact in zip(
        (found.query, found.key, found.value, found.of(bias)), right, strict=True
    ):
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, exact)


def exported(f: Any) -> Any:
    """What another process would load."""
    check = jax.export.DisabledSafetyCheck.custom_call("qkv")
    return jax.export.export(jax.jit(f), disabled_checks=[check])(X).call


def test_exported_code_does_not_mix_up_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score mods are written into the program, which means the same in another process."""
    from qkv.bridges.jax import operations as jax_operations

    mod = qkv.ScoreMod(lambda score, batch, head, q_pos, kv_pos: score * 2)
    plain, modified = (
        exported(lambda x, call_variants=call_variants: qkv.attention(x, x, x, *call_variants))
        for call_variants in ([qkv.Causal()], [mod])
    )
    np.testing.assert_array_equal(modified(X), qkv.attention(X, X, X, mod))
    monkeypatch.setattr(jax_operations, "PROCESS", 1)
    np.testing.assert_array_equal(plain(X), qkv.attention(X, X, X, qkv.Causal()))
    np.testing.assert_array_equal(modified(X), qkv.attention(X, X, X, mod))
