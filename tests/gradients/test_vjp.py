"""The arguments and results of `qkv.vjp`, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv.backends import backends, choose
from qkv.backends.blocked import BlockedBackend
from qkv.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from qkv.problem.building.check import check

RNG = np.random.default_rng(0)
Q, K, V, G = (RNG.normal(size=(2, 9, 4)) for _ in range(4))
BACKENDS = [backend.name for backend in backends() if hasattr(backend, "backward")]


def test_every_backend_of_this_package_computes_gradients() -> None:
    assert {"cpu", "blocked", "reference"} <= set(BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_output_is_that_of_attention(backend) -> None:
    call_variants = qkv.Causal(), qkv.Sinks(0.3)
    out, lse = qkv.attention(Q, K, V, *call_variants, return_lse=True, backend=backend)
    (got, rows), _ = qkv.vjp(Q, K, V, *call_variants, return_lse=True, backend=backend)
    np.testing.assert_array_equal(got, out)
    np.testing.assert_array_equal(rows, lse)


def total(arrays: dict[str, np.ndarray], grad_lse: np.ndarray, backend: str) -> float:
    """A number made of everything that can have a gradient."""
    cap, values = arrays["cap"], arrays["values"]
    out, lse = qkv.attention(
        arrays["query"], arrays["key"], arrays["value"],
        qkv.RoPE(), qkv.ScoreMod(lambda s, b, h, q, k: s * values[h] + values[k % 2]),
        qkv.Bias(arrays["bias"]), qkv.ALiBi(arrays["slopes"]), qkv.Softcap(float(cap)),
        qkv.Causal(), qkv.Sinks(arrays["sinks"]), qkv.Dropout(0.2, 3),
        backend=backend, return_lse=True,
    )  # fmt: skip
    return float((out * G).sum() + (lse * grad_lse).sum())


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_central_differences(backend) -> None:
    arrays = {
        "query": Q, "key": K, "value": V, "bias": RNG.normal(size=(9, 9)),
        "slopes": RNG.random(2), "cap": np.array(2.0), "sinks": RNG.normal(size=2),
        "values": RNG.normal(size=2),
    }  # fmt: skip
    grad_lse = RNG.normal(size=(2, 9))
    values = arrays["values"]
    own = {
        "values": qkv.ScoreMod(lambda s, b, h, q, k: s * values[h] + values[k % 2]),
        "bias": qkv.Bias(arrays["bias"]), "slopes": qkv.ALiBi(arrays["slopes"]),
        "cap": qkv.Softcap(float(arrays["cap"])), "sinks": qkv.Sinks(arrays["sinks"]),
    }  # fmt: skip
    others = qkv.Causal(), qkv.Dropout(0.2, 3)
    _, pullback = qkv.vjp(Q, K, V, qkv.RoPE(), *own.values(), *others, backend=backend)
    found = pullback(G, grad_lse, wrt=own.values())
    result = {"query": found.query, "key": found.key, "value": found.value}
    result |= {name: found.of(variant) for name, variant in own.items()}
    for name, array in arrays.items():
        for place in list(np.ndindex(array.shape))[:: max(1, array.size // 7)]:
            step = np.zeros_like(array)
            step[place] = 1e-6
            ahead, behind = (
                total({**arrays, name: array + sign * step}, grad_lse, backend) for sign in (1, -1)
            )
            difference = (ahead - behind) / 2e-6
            assert abs(difference - result[name][place]) < 1e-7, (name, place)


def test_a_pullback_can_be_used_again_and_is_linear() -> None:
    _, pullback = qkv.vjp(Q, K, V, qkv.Causal())
    once, twice, again = pullback(G), pullback(2 * G), pullback(G)
    np.testing.assert_array_equal(once.query, again.query)
    np.testing.assert_allclose(twice.key, 2 * once.key, rtol=1e-12)


@pytest.mark.slow
def test_a_bare_bias_and_one_that_is_given_twice() -> None:
    bias = RNG.normal(size=(9, 9))
    twice = qkv.Bias(RNG.normal(size=(1, 9)))
    _, pullback = qkv.vjp(Q, K, V, bias, twice, twice)
    found = pullback(G, wrt=[bias, twice])
    assert found.of(bias).shape == (9, 9)
    np.testing.assert_allclose(found.of(twice)[0], 2 * found.of(bias).sum(axis=0), atol=1e-12)


def test_one_of_several_arrays_of_a_score_mod() -> None:
    first, second = RNG.normal(size=2), RNG.normal(size=9)
    mod = qkv.ScoreMod(lambda s, b, h, q, k: s + first[h] + second[k])
    _, pullback = qkv.vjp(Q, K, V, mod)
    found = pullback(G, wrt=[mod])
    assert found.of(mod, first).shape == (2,)
    np.testing.assert_allclose(found.of(mod, first), 0, atol=1e-12)
    assert found.of(mod, second).shape == (9,)
    with pytest.raises(ArgumentError, match="has 2 arrays"):
        found.of(mod)


@pytest.mark.slow
def test_a_narrow_bias_has_a_narrow_gradient() -> None:
    bias = qkv.Bias(RNG.normal(size=(9, 1)).astype(np.float16))
    _, pullback = qkv.vjp(Q, K, V, bias)
    assert pullback(G, wrt=[bias]).of(bias).dtype == np.float16


@pytest.mark.parametrize(
    ("action", "kind", "match"),
    [
        (lambda p: p(G[:, :3]), ShapeError, r"\(2, 3, 4\).*\(2, 9, 4\)"),
        (lambda p: p(G.astype(np.float32)), DTypeError, "float32.*float64"),
        (lambda p: p(G, np.zeros(9)), ShapeError, "grad_lse"),
        (lambda p: p([[1.0]]), DTypeError, "not an array"),
        (lambda p: p(G, wrt=[qkv.Causal()]), ArgumentError, "no score of this call"),
        (lambda p: p(G, wrt=[qkv.Softcap(2.0)]), ArgumentError, "very objects"),
        (lambda p: p(G).of(qkv.Softcap(2.0)), ArgumentError, "pullback"),
    ],
)
def test_what_is_refused(action, kind, match) -> None:
    _, pullback = qkv.vjp(Q, K, V, qkv.Causal(), qkv.Softcap(2.0))
    with pytest.raises(kind, match=f"(?s){match}"):
        action(pullback)


def test_a_bias_that_repeats_its_entries() -> None:
    """Each entry of the array as it was given has a gradient of its own."""
    row = RNG.normal(size=(1, 9))
    found = []
    for array in (np.broadcast_to(row, (9, 9)), np.repeat(row, 9, axis=0)):
        bias = qkv.Bias(array)
        _, pullback = qkv.vjp(Q, K, V, bias)
        found.append(pullback(G, wrt=[bias]).of(bias))
    assert found[0].shape == (9, 9)
    np.testing.assert_array_equal(*found)


class OneWay:
    """`blocked` without its gradients."""

    name = "one-way"
    priority = 1000
    refusals, run = BlockedBackend.refusals, BlockedBackend.run
    blocks, scratch_bytes = BlockedBackend.blocks, BlockedBackend.scratch_bytes


def test_a_backend_without_a_way_back_is_passed_over() -> None:
    from qkv.backends import register, unregister

    register(OneWay())
    try:
        spec = check(Q, K, V, ()).spec
        assert choose(spec).backend.name == "one-way"
        assert choose(spec, backward=True).backend.name != "one-way"
        qkv.vjp(Q, K, V)[1](G)
        with pytest.raises(UnsupportedError, match="no backward pass"):
            qkv.vjp(Q, K, V, backend="one-way")
    finally:
        unregister("one-way")


def written_out(q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray) -> list[np.ndarray]:
    """Gradients of query, key and value in the type of the arrays."""
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    scores = q @ k.swapaxes(1, 2) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = g @ v.swapaxes(1, 2)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * scale
    return [d_scores @ k, d_scores.swapaxes(1, 2) @ q, weights.swapaxes(1, 2) @ g]


@pytest.mark.parametrize("sinks", [(), (qkv.Sinks(-200.0),)], ids=["", "sinks"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(6, 40), (40, 300)])
@pytest.mark.parametrize(("spread", "offset"), [(1.5, 0.0), (1.0, 9.0)])
def test_rows_where_one_key_has_nearly_all_the_weight(spread, offset, q_len, kv_len, sinks) -> None:
    """Gradients are as exact as the formula in float32: rounding of lse must not show."""
    rng = np.random.default_rng(0)
    for _ in range(6):
        q, k, v, g = (rng.normal(size=(2, n, 8)) for n in (q_len, kv_len, kv_len, q_len))
        arrays = [(a * s + o).astype(np.float32) for a, s, o in
                  zip((q, k, v, g), (spread, spread, 1, 1), (offset * (np.arange(8) == 0),) * 2
                      + (0, 0), strict=True)]  # fmt: skip
        truth = written_out(*(a.astype(np.float64) for a in arrays))
        _, pullback = qkv.vjp(*arrays[:3], *sinks, backend="cpu")
        found = pullback(arrays[3])
        got = found.query, found.key, found.value
        for exact, plain, gradient in zip(truth, written_out(*arrays), got, strict=True):
            allowed = np.abs(plain - exact).max() + 2.0**-23 * max(1, np.abs(exact).max())
            assert np.abs(gradient - exact).max() <= 3 * allowed


def test_a_pullback_is_named_in_one_line() -> None:
    x = np.ones((2, 5, 8))
    _, pullback = qkv.vjp(x, x, x, qkv.Causal())
    sizes = "query (2, 5, 8), key (2, 5, 8), value (2, 5, 8)"
    assert repr(pullback) == f"Pullback({sizes}, Causal())"
