"""Variants against torch and published tables, which qkv's authors did not write."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import qkv
from qkv.variants.scores.alibi import alibi_slopes
from qkv.variants.scores.relative_bias import relative_buckets

pytestmark = pytest.mark.usefixtures("masks_unread_and_read")
BACKENDS = pytest.mark.parametrize("backend", ["auto", "blocked", "reference"])


def normal(seed, *shapes, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def in_torch(*arrays, **keywords):
    return scaled_dot_product_attention(*map(torch.from_numpy, arrays), **keywords).numpy()


@BACKENDS
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(33, 33), (7, 50), (50, 7)])
def test_plain_and_causal(backend, dtype, causal, q_len, kv_len) -> None:
    q, k, v = normal(1, (2, 4, q_len, 16), (2, 4, kv_len, 16), (2, 4, kv_len, 24), dtype=dtype)
    variants = (qkv.Causal(align="start"),) if causal else ()
    got = qkv.attention(q, k, v, *variants, backend=backend)
    expected = in_torch(q, k, v, is_causal=causal)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@BACKENDS
def test_grouped_heads(backend) -> None:
    q, k, v = normal(2, (2, 6, 20, 16), (2, 2, 30, 16), (2, 2, 30, 16))
    got = qkv.attention(q, k, v, backend=backend)
    np.testing.assert_allclose(got, in_torch(q, k, v, enable_gqa=True), rtol=1e-5, atol=1e-5)


@BACKENDS
def test_boolean_and_floating_masks(backend) -> None:
    q, k, v = normal(3, (2, 4, 20, 16), (2, 4, 30, 16), (2, 4, 30, 16))
    rng = np.random.default_rng(4)
    mask = rng.random((2, 1, 20, 30)) < 0.5
    mask[..., 0] = True
    bias = rng.normal(size=(4, 20, 30)).astype(np.float32)
    for extra in (mask, bias, np.where(mask, 0, -np.inf).astype(np.float32)):
        np.testing.assert_allclose(
            qkv.attention(q, k, v, extra, backend=backend),
            in_torch(q, k, v, attn_mask=torch.from_numpy(extra)),
            rtol=1e-5,
            atol=1e-5,
        )


@BACKENDS
def test_scale(backend) -> None:
    q, k, v = normal(5, (3, 9, 8), (3, 12, 8), (3, 12, 8))
    got = qkv.attention(q, k, v, scale=0.77, backend=backend)
    np.testing.assert_allclose(got, in_torch(q, k, v, scale=0.77), rtol=1e-5, atol=1e-5)


@BACKENDS
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_sixteen_bits(backend, name) -> None:
    """The result agrees with torch's float32 one, rounded."""
    import ml_dtypes

    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[name]
    rounded = [a.astype(dtype) for a in normal(6, (2, 40, 32), (2, 60, 32), (2, 60, 32))]
    got = qkv.attention(*rounded, backend=backend).astype(np.float32)
    eps = float(ml_dtypes.finfo(dtype).eps)
    expected = in_torch(*(a.astype(np.float32) for a in rounded))
    np.testing.assert_allclose(got, expected, rtol=2 * eps, atol=2 * eps)


@BACKENDS
def test_sinks_are_one_more_column_of_the_softmax(backend) -> None:
    """gpt-oss writes it so: concatenate, softmax, drop the column."""
    q, k, v = normal(7, (4, 9, 8), (4, 12, 8), (4, 12, 8))
    sinks = np.random.default_rng(8).normal(size=4).astype(np.float32)
    scores = torch.from_numpy(q) @ torch.from_numpy(k).transpose(-1, -2) * 8**-0.5
    column = torch.from_numpy(sinks)[:, None, None].expand(4, 9, 1)
    weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    got = qkv.attention(q, k, v, qkv.Sinks(sinks), backend=backend)
    np.testing.assert_allclose(got, (weights @ torch.from_numpy(v)).numpy(), rtol=1e-5, atol=1e-6)


@BACKENDS
def test_softcap_as_gemma_writes_it(backend) -> None:
    q, k, v = normal(9, (4, 9, 8), (4, 12, 8), (4, 12, 8))
    scores = torch.from_numpy(q) @ torch.from_numpy(k).transpose(-1, -2) * 8**-0.5
    weights = (torch.tanh(scores / 1.3) * 1.3).softmax(dim=-1)
    got = qkv.attention(q, k, v, qkv.Softcap(1.3), backend=backend)
    np.testing.assert_allclose(got, (weights @ torch.from_numpy(v)).numpy(), rtol=1e-5, atol=1e-6)


def t5_bucket(relative_position, bidirectional, num_buckets, max_distance):
    """`_relative_position_bucket` of the published T5, as it is written there."""
    relative_buckets = 0
    if bidirectional:
        num_buckets //= 2
        relative_buckets += (relative_position > 0).to(torch.long) * num_buckets
        relative_position = torch.abs(relative_position)
    else:
        relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
    max_exact = num_buckets // 2
    is_small = relative_position < max_exact
    relative_position_if_large = max_exact + (
        torch.log(relative_position.float() / max_exact)
        / math.log(max_distance / max_exact)
        * (num_buckets - max_exact)
    ).to(torch.long)
    relative_position_if_large = torch.min(
        relative_position_if_large, torch.full_like(relative_position_if_large, num_buckets - 1)
    )
    return relative_buckets + torch.where(is_small, relative_position, relative_position_if_large)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (32, 64), (64, 256), (8, 20), (320, 800)]
)
def test_t5_buckets(bidirectional, num_buckets, max_distance) -> None:
    distances = np.arange(-2000, 2001)
    expected = t5_bucket(torch.from_numpy(distances), bidirectional, num_buckets, max_distance)
    got = relative_buckets(distances, num_buckets, bidirectional, max_distance)
    np.testing.assert_array_equal(got, expected.numpy())


@BACKENDS
@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias(backend, bidirectional) -> None:
    q, k, v = normal(10, (4, 30, 8), (4, 30, 8), (4, 30, 8))
    table = np.random.default_rng(11).normal(size=(16, 4)).astype(np.float32)
    place = torch.arange(30)
    buckets = t5_bucket(place[None, :] - place[:, None], bidirectional, 16, 20)
    bias = torch.from_numpy(table)[buckets].permute(2, 0, 1)
    got = qkv.attention(q, k, v, qkv.RelativeBias(table, bidirectional, 20), backend=backend)
    np.testing.assert_allclose(got, in_torch(q, k, v, attn_mask=bias), rtol=1e-5, atol=1e-5)


def test_alibi_slopes_of_the_paper() -> None:
    """Section 3: 8 heads 1/2 ... 1/256; 16 heads interpolate; 12 heads as in the published code."""
    np.testing.assert_array_equal(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(16), [2 ** (-i / 2) for i in range(1, 17)])
    np.testing.assert_allclose(
        alibi_slopes(12), [2.0**-i for i in range(1, 9)] + [2.0**-e for e in (0.5, 1.5, 2.5, 3.5)]
    )
    np.testing.assert_array_equal(alibi_slopes(1), [2.0**-8])
    assert len(alibi_slopes(0)) == 0


@BACKENDS
def test_alibi(backend) -> None:
    q, k, v = normal(12, (8, 30, 8), (8, 30, 8), (8, 30, 8))
    place = torch.arange(30)
    distance = (place[None, :] - place[:, None]).abs()
    bias = -torch.tensor([2.0**-i for i in range(1, 9)])[:, None, None] * distance
    got = qkv.attention(q, k, v, qkv.ALiBi(), backend=backend)
    np.testing.assert_allclose(got, in_torch(q, k, v, attn_mask=bias), rtol=1e-5, atol=1e-5)


def llama_rotation(x, base):
    """`apply_rotary_pos_emb` as Hugging Face's Llama writes it."""
    dim = x.shape[-1]
    inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
    angles = torch.outer(torch.arange(x.shape[-2]).float(), inv_freq)
    emb = torch.cat((angles, angles), dim=-1)
    half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), dim=-1)
    return x * emb.cos() + half * emb.sin()


def gptj_rotation(x, base):
    """Pairs (2 i, 2 i + 1) as complex numbers, as the paper has them."""
    dim = x.shape[-1]
    inv_freq = base ** (-torch.arange(0, dim, 2).double() / dim)
    angles = torch.outer(torch.arange(x.shape[-2]).double(), inv_freq)
    turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.exp(1j * angles)
    return torch.view_as_real(turned).flatten(-2).float()


@BACKENDS
@pytest.mark.parametrize(
    ("layout", "rotation"), [("half_split", llama_rotation), ("interleaved", gptj_rotation)]
)
def test_rope(backend, layout, rotation) -> None:
    q, k, v = normal(13, (2, 20, 16), (2, 20, 16), (2, 20, 16))
    turned = [rotation(torch.from_numpy(a), 500.0).numpy() for a in (q, k)]
    got = qkv.attention(q, k, v, qkv.RoPE(base=500.0, layout=layout), backend=backend)
    np.testing.assert_allclose(got, in_torch(*turned, v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["half_split", "interleaved"])
def test_rope_depends_on_the_distance_alone(layout) -> None:
    q, k, v = normal(14, (2, 20, 16), (2, 20, 16), (2, 20, 16), dtype=np.float64)
    rope = qkv.RoPE(layout=layout)
    still = qkv.attention(q, k, v, rope)
    moved = qkv.attention(q, k, v, rope, q_offset=1000, kv_offset=1000)
    np.testing.assert_allclose(still, moved, rtol=1e-11, atol=1e-11)
    assert not np.allclose(still, qkv.attention(q, k, v, rope, q_offset=1))


def test_rope_leaves_the_rest_of_a_row_alone() -> None:
    """Entries from 4 on are the same with rotary_dim=4 as without a rotation."""
    q, k, v = normal(15, (1, 9, 12), (1, 9, 12), (1, 9, 12), dtype=np.float64)
    q[..., :4] = 0
    rotated = qkv.attention(q, k, v, qkv.RoPE(rotary_dim=4))
    np.testing.assert_allclose(rotated, qkv.attention(q, k, v), rtol=1e-12, atol=1e-12)
    given = 10000.0 ** (-np.arange(2) / 2)
    q, k, v = normal(16, (1, 9, 12), (1, 9, 12), (1, 9, 12), dtype=np.float64)
    np.testing.assert_array_equal(
        qkv.attention(q, k, v, qkv.RoPE(rotary_dim=4)),
        qkv.attention(q, k, v, qkv.RoPE(inv_freq=given)),
    )


@BACKENDS
def test_segments_are_separate_calls(backend) -> None:
    q, k, v = normal(17, (2, 12, 8), (2, 12, 8), (2, 12, 8))
    cu = [0, 5, 5, 12]
    got = qkv.attention(q, k, v, qkv.Segments.from_cu_seqlens(cu), qkv.Causal(), backend=backend)
    for a, b in ((0, 5), (5, 12)):
        alone = in_torch(*(x[:, a:b] for x in (q, k, v)), is_causal=True)
        np.testing.assert_allclose(got[:, a:b], alone, rtol=1e-5, atol=1e-5)


@BACKENDS
@pytest.mark.parametrize("left", [0, 3, 100])
def test_a_window_is_a_band(backend, left) -> None:
    """A Hugging Face window of W is left = W - 1."""
    q, k, v = normal(18, (2, 40, 8), (2, 40, 8), (2, 40, 8))
    rows, columns = torch.arange(40)[:, None], torch.arange(40)[None, :]
    band = (columns <= rows) & (columns > rows - (left + 1))
    got = qkv.attention(q, k, v, qkv.SlidingWindow(left, 0), backend=backend)
    np.testing.assert_allclose(got, in_torch(q, k, v, attn_mask=band), rtol=1e-5, atol=1e-5)


@BACKENDS
def test_large_finite_bias_is_arithmetic(backend) -> None:
    """A row that has nothing else attends uniformly; an exact -inf gives an empty row."""
    q, k, v = normal(19, (1, 3, 8), (1, 5, 8), (1, 5, 8))
    mean = np.broadcast_to(v.mean(axis=-2, keepdims=True), (1, 3, 8))
    for low in (np.finfo(np.float32).min, np.finfo(np.float64).min, -1e30):
        bias = np.full((3, 5), low)
        np.testing.assert_allclose(
            qkv.attention(q, k, v, bias, backend=backend), mean, rtol=1e-5, atol=1e-6
        )
    out, lse = qkv.attention(q, k, v, np.full((3, 5), -np.inf), backend=backend, return_lse=True)
    assert (out == 0).all()
    assert np.isneginf(lse).all()
