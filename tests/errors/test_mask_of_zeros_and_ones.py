"""A floating mask of zeros and ones is a bias, as in torch; a warning says so, and what to do."""

import warnings

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

import qkv

RNG = np.random.default_rng(0)
Q, K, V = RNG.normal(size=(3, 2, 4, 40, 8)).astype(np.float32)
CAUSAL = np.tril(np.ones((40, 40), np.float32))
PADDING = (np.arange(40) < np.array([40, 13])[:, None]).astype(np.float32)[:, None, None]
LONG = np.ones((1, 3000), np.float64)
LONG[:, 2900:] = 0


@pytest.mark.parametrize(
    "mask",
    [CAUSAL, CAUSAL[::-1], CAUSAL.T[None, None], PADDING, CAUSAL.astype(np.float64),
     CAUSAL.astype(np.float16), CAUSAL.astype(ml_dtypes.bfloat16)],
)  # fmt: skip
def test_it_is_a_bias_with_a_warning_that_names_both_remedies(mask) -> None:
    with pytest.warns(qkv.MaskLooksBooleanWarning) as caught:
        out = qkv.attention(Q, K, V, mask, backend="blocked")
    (warning,) = caught
    assert warning.filename == __file__
    assert all(word in str(warning.message) for word in ("astype(bool)", ".bool()", "qkv.Bias"))
    assert issubclass(qkv.MaskLooksBooleanWarning, UserWarning)
    scores = torch.from_numpy(Q) @ torch.from_numpy(K).mT / 8**0.5
    weights = (scores + torch.from_numpy(mask.astype(np.float32))).softmax(-1)
    np.testing.assert_allclose(out, weights @ torch.from_numpy(V), rtol=1e-4, atol=1e-5)


def test_tensors_and_jax_arrays() -> None:
    q, k, v = map(torch.from_numpy, (Q, K, V))
    with pytest.warns(qkv.MaskLooksBooleanWarning):
        qkv.attention(q, k, v, torch.from_numpy(CAUSAL))
    with pytest.warns(qkv.MaskLooksBooleanWarning):
        qkv.attention(*map(jax.numpy.asarray, (Q, K, V)), jax.numpy.asarray(CAUSAL))


def test_inspect_plan_and_vjp() -> None:
    for function in (qkv.inspect, qkv.plan, qkv.vjp, qkv.explain):
        with pytest.warns(qkv.MaskLooksBooleanWarning):
            function(Q, K, V, CAUSAL)


def test_few_zeros_of_a_long_array() -> None:
    """Every 94th of 3000 keys is looked at."""
    q, k = np.ones((2, 4)), np.ones((3000, 4))
    with pytest.warns(qkv.MaskLooksBooleanWarning):
        qkv.attention(q, k, k, LONG)


@pytest.mark.parametrize(
    "call_variants",
    [
        CAUSAL.astype(bool),
        qkv.Bias(CAUSAL),
        np.zeros((40, 40)),
        np.ones((40, 40)),
        CAUSAL * 0.5,
        CAUSAL * -1e9,
        np.where(CAUSAL, 0, -np.inf),
        CAUSAL + np.eye(40)[::-1] * 1e-3,
        np.zeros((40, 0, 0)).sum((1, 2), keepdims=True)[..., 0],
    ],
)
def test_masks_and_biases_do_not_warn(call_variants) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qkv.attention(Q, K, V, call_variants, backend="blocked")


def test_an_entry_that_was_not_sampled_counts() -> None:
    bias = np.tile(CAUSAL, (10, 10))
    bias[1, 1] = 0.25
    q = np.ones((400, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qkv.attention(q, q, q, bias)


def test_calls_like_an_earlier_one_do_not_look_again(monkeypatch) -> None:
    """What a prepared call costs must not grow with the mask."""
    from qkv.variants.scores import bias

    looked = []
    monkeypatch.setattr(bias, "_is_zeros_and_ones", lambda array: looked.append(array.size))
    rows = RNG.normal(size=(2, 4, 64, 16)).astype(np.float32)
    mask = RNG.normal(size=(64, 64)).astype(np.float32)
    for _ in range(3):
        qkv.attention(rows, rows, rows, mask)
    assert looked
    assert max(looked) <= bias.SAMPLED
    looked.clear()
    for _ in range(5):
        qkv.attention(rows, rows, rows, mask)
    assert not looked
