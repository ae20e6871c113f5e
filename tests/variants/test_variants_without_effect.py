"""Variants and arguments that are as good as none: no bit of a result changes."""

import numpy as np
import pytest

import qkv
from host_backends import HOST_BACKENDS

BACKENDS = pytest.mark.parametrize("backend", HOST_BACKENDS)
HEADS, Q_LEN, KV_LEN = 4, 21, 21
RNG = np.random.default_rng(0)
QUERY = RNG.normal(size=(2, HEADS, Q_LEN, 8)).astype(np.float32)
KEY = RNG.normal(size=(2, 2, KV_LEN, 8)).astype(np.float32)
VALUE = RNG.normal(size=(2, 2, KV_LEN, 6)).astype(np.float32)

WITHOUT_EFFECT = [
    qkv.SlidingWindow(None, None),
    qkv.SlidingWindow(KV_LEN, Q_LEN),
    qkv.KeyLengths(KV_LEN),
    qkv.KeyLengths([KV_LEN, KV_LEN]),
    qkv.Segments(np.zeros(Q_LEN, int)),
    qkv.Prefix(KV_LEN),
    qkv.GlobalTokens(np.arange(KV_LEN)),
    qkv.Strided(1),
    qkv.BlockSparse(np.ones((1, 3, 3), bool), 7, 7),
    qkv.Mask(np.ones((1, 1), bool)),
    qkv.Mask(np.ones((2, HEADS, Q_LEN, KV_LEN), bool)),
    qkv.Causal() | ~qkv.Causal(),
    ~~qkv.Prefix(KV_LEN),
    qkv.Bias(np.zeros((1, 1))),
    qkv.Bias(np.zeros((2, HEADS, Q_LEN, KV_LEN), np.float32)),
    qkv.ALiBi(0.0),
    qkv.RelativeBias(np.zeros((8, HEADS))),
    qkv.ScoreMod(lambda score, b, h, q, k: score),
    qkv.ScoreMod(lambda score, b, h, q, k: np.where(q < -5, -np.inf, score)),
    qkv.RoPE(rotary_dim=0),
    qkv.RoPE(inv_freq=[0.0, 0.0]),
    qkv.Sinks(-np.inf),
    qkv.Dropout(0.0, 7),
    np.ones((Q_LEN, KV_LEN), bool),
    np.zeros((Q_LEN, KV_LEN)),
]


@pytest.mark.slow
@BACKENDS
@pytest.mark.sampled("variant", WITHOUT_EFFECT, one_in=4, ids=lambda v: f"{v!r:.40}")
def test_a_variant_without_effect_changes_no_bit(backend, variant) -> None:
    plain = qkv.attention(QUERY, KEY, VALUE, backend=backend, return_lse=True)
    with_variant = qkv.attention(QUERY, KEY, VALUE, variant, backend=backend, return_lse=True)
    for a, b in zip(plain, with_variant, strict=True):
        assert a.tobytes() == b.tobytes()


def test_merge_of_one_part_is_that_part() -> None:
    out, lse = qkv.attention(QUERY, KEY, VALUE, return_lse=True)
    joined = qkv.merge((out, lse))
    assert joined[0].tobytes() == out.tobytes()
    assert joined[1].tobytes() == lse.tobytes()


def test_defaults_may_be_passed() -> None:
    x = QUERY[:, :2]
    plain = qkv.attention(x, KEY, VALUE)
    with_variant = qkv.attention(
        x, KEY, VALUE, scale=None, layout="bhld", q_offset=None, kv_offset=0, return_lse=False,
        backend="auto",
    )  # fmt: skip
    assert plain.tobytes() == with_variant.tobytes()
    assert qkv.attention(x, KEY, VALUE, scale=8**-0.5).tobytes() == plain.tobytes()
