"""What random problems have found, each as the smallest call that showed it."""

import ml_dtypes
import numpy as np
import pytest

import qkv
from qkv.testing import bounds, truth

pytestmark = pytest.mark.usefixtures("masks_unread_and_read")


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("q_len", [1, 40])
def test_a_rotation_of_nothing_in_sixteen_bits(dtype, q_len) -> None:
    """Rows that were not rotated were read as the float32 that rotated ones are."""
    query, key = normal(2, q_len, 6, dtype=dtype), normal(2, 40, 6, dtype=dtype, seed=1)
    rope = qkv.RoPE(rotary_dim=0)
    found = qkv.attention(query, key, key, rope, q_offset="end")
    assert found.tobytes() == qkv.attention(query, key, key, q_offset="end").tobytes()
    expected = truth(query, key, key, (rope,), q_offset="end")
    assert np.abs(found - expected.out).max() <= bounds(expected, dtype).out


@pytest.mark.parametrize("q_len", [0, 3])
@pytest.mark.parametrize("kv_len", [0, 3])
def test_segments_of_no_rows(q_len, kv_len) -> None:
    query, key = normal(2, 1, q_len, 4), normal(2, 1, kv_len, 4)
    segments = qkv.Segments(np.zeros((2, q_len), int), np.zeros(kv_len, int))
    out, lse = qkv.attention(query, key, key, segments, return_lse=True)
    assert out.shape == query.shape
    if kv_len == 0:
        assert (out == 0).all()
        assert np.isneginf(lse).all()


@pytest.mark.parametrize("kv_len", [0, 1])
def test_a_plan_for_few_queries_without_keys(kv_len) -> None:
    """The number of chunks was divided by their length."""
    query, key = normal(2, 4, 1, 8), normal(2, 1, kv_len, 8)
    assert qkv.plan(query, key, key, backend="cpu").scratch_bytes >= 0


@pytest.mark.parametrize("backend", ["cpu", "blocked", "reference"])
def test_a_sink_beside_large_scores(backend) -> None:
    """The share was once a quotient of two numbers that had lost their digits to the scores."""
    query, key, value = 30 * normal(1, 200, 1), normal(1, 1, 1, seed=1), normal(1, 1, 3, seed=2)
    call_variants = (qkv.Sinks(3.5),)
    found = qkv.attention(query, key, value, *call_variants, backend=backend)
    expected = truth(query, key, value, call_variants)
    assert np.abs(expected.scores).max() > 20
    assert np.abs(found - expected.out).max() <= bounds(expected, np.float32).out


def test_two_dense_masks_of_bfloat16() -> None:
    """The second one was laid down over the first, from the 65th key on."""
    query, key = (normal(1, n, 8, dtype=ml_dtypes.bfloat16, seed=n) for n in (40, 100))
    bias, more = normal(2, 40, 100)
    call_variants = (qkv.Bias(bias), qkv.Bias(more))
    _, lse = qkv.attention(query, key, key, *call_variants, return_lse=True)
    expected = truth(query, key, key, call_variants)
    assert np.abs(lse - expected.lse).max() <= bounds(expected, ml_dtypes.bfloat16).lse


@pytest.mark.parametrize("q_len", [2, 200])
@pytest.mark.parametrize("kv_len", [2, 3, 5])
def test_lse_near_zero(q_len, kv_len) -> None:
    """The sum's logarithm was once rounded before the largest score took most of it away."""
    query = (-np.log(kv_len) + 1e-3 * normal(q_len, 1)).astype(np.float32)
    ones = np.ones((kv_len, 1), np.float32)
    _, lse = qkv.attention(query, ones, ones, return_lse=True)
    exact = query[:, 0].astype(float) + np.log(kv_len)
    assert np.abs(lse - exact).max() < 1.5e-9


@pytest.mark.slow
@pytest.mark.parametrize("q_len", [2, 200])
@pytest.mark.parametrize("cap", [2.0, 5.1, 50.0])
def test_a_capped_score_is_rounded_about_once(q_len, cap) -> None:
    """A score was once divided, taken to tanh and multiplied, with an error in each step."""
    query = normal(q_len, 1)
    one = np.ones((1, 1), np.float32)
    capped = (qkv.Softcap(cap), qkv.ScoreMod(lambda s, b, h, q, k: np.tanh(s / cap) * cap))
    for call_variants in capped:
        _, lse = qkv.attention(query, one, one, call_variants, return_lse=True)
        rounded_cap = float(np.float32(cap))
        exact = rounded_cap * np.tanh(query[:, 0].astype(float) / rounded_cap)
        near = np.abs(query[:, 0]) < 0.6 * cap
        units = np.abs(lse - exact) / np.spacing(np.abs(exact).astype(np.float32))
        assert units[near].max() < 0.65
        assert units.max() < 1.5


@pytest.mark.parametrize("q_len", [2, 200])
@pytest.mark.parametrize("kv_len", [2, 5, 16])
def test_few_weights_are_added_without_loss(q_len, kv_len) -> None:
    """Rounding their sum was most of the error of lse where the largest score takes it away."""
    query = np.ones((50, 1, q_len, 1), np.float32)
    key = (-np.log(kv_len) + 0.5 * normal(50, 1, kv_len, 1)).astype(np.float32)
    _, lse = qkv.attention(query, key, key, return_lse=True)
    exact = np.log(np.exp(key.astype(float)).sum(axis=(-2, -1)))[..., None]
    assert np.abs(lse - exact).max() < 0.85 * 2.0**-24


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("head_dim", [2, 3, 4])
def test_products_of_short_rows_are_rounded_once(q_len, head_dim) -> None:
    """Few queries: each of their products was rounded before it was added."""
    query, key = 30 * normal(400, q_len, head_dim), normal(400, 1, head_dim, seed=1)
    _, lse = qkv.attention(query, key, key, scale=1.0, return_lse=True)
    exact = query.astype(float) @ key.astype(float).swapaxes(-1, -2)
    np.testing.assert_array_equal(lse, exact[..., 0].astype(np.float32))
