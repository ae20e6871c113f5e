"""Nothing said, nothing given, nothing there: what must change no bit, and what must not fail."""

import numpy as np
import pytest

import qkv
from qkv.backends import backends

BACKENDS = pytest.mark.parametrize("backend", [b.name for b in backends()])
HEADS, Q_LEN, KV_LEN = 4, 21, 21
RNG = np.random.default_rng(0)
QUERY = RNG.normal(size=(2, HEADS, Q_LEN, 8)).astype(np.float32)
KEY = RNG.normal(size=(2, 2, KV_LEN, 8)).astype(np.float32)
VALUE = RNG.normal(size=(2, 2, KV_LEN, 6)).astype(np.float32)

SAY_NOTHING = [
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


@BACKENDS
@pytest.mark.parametrize("variant", SAY_NOTHING, ids=lambda v: f"{v!r:.40}")
def test_a_variant_that_says_nothing_changes_no_bit(backend, variant) -> None:
    plain = qkv.attention(QUERY, KEY, VALUE, backend=backend, return_lse=True)
    said = qkv.attention(QUERY, KEY, VALUE, variant, backend=backend, return_lse=True)
    for a, b in zip(plain, said, strict=True):
        assert a.tobytes() == b.tobytes()


@BACKENDS
@pytest.mark.parametrize(
    ("batch", "heads", "q_len", "kv_len"),
    [
        ((2,), 2, 0, 5),
        ((2,), 2, 5, 0),
        ((2,), 2, 0, 0),
        ((0,), 2, 5, 5),
        ((2, 0), 2, 5, 5),
        ((2,), 0, 5, 5),
        ((), 0, 0, 0),
    ],
)
def test_arrays_of_no_size(backend, batch, heads, q_len, kv_len) -> None:
    query = np.ones((*batch, heads, q_len, 4), np.float32)
    key = value = np.ones((*batch, heads, kv_len, 4), np.float32)
    variants = (qkv.Causal(), qkv.ALiBi(), qkv.RoPE(), qkv.KeyLengths(kv_len), qkv.Softcap(2.0))
    for said in ((), variants):
        out, lse = qkv.attention(
            query, key, value, *said, q_offset="end", backend=backend, return_lse=True
        )
        assert out.shape == query.shape
        assert lse.shape == query.shape[:-1]
        assert (out == 0).all() or kv_len
        assert np.isneginf(lse).all() or kv_len


def test_every_function_takes_arrays_of_no_size() -> None:
    empty = np.zeros((0, 4))
    x = np.ones((3, 4))
    for q, k in ((empty, x), (x, empty), (empty, empty)):
        record = qkv.inspect(q, k, k)
        assert record.output.shape == q.shape
        assert record.entropy.shape == q.shape[:1]
        qkv.plan(q, k, k)
        qkv.explain(q, k, k)


def test_merge_of_one_part_is_that_part() -> None:
    out, lse = qkv.attention(QUERY, KEY, VALUE, return_lse=True)
    joined = qkv.merge((out, lse))
    assert joined[0].tobytes() == out.tobytes()
    assert joined[1].tobytes() == lse.tobytes()


def test_merge_with_attention_over_no_keys_changes_no_bit() -> None:
    whole = qkv.attention(QUERY, KEY, VALUE, return_lse=True)
    nothing = qkv.attention(QUERY, KEY[..., :0, :], VALUE[..., :0, :], return_lse=True)
    for parts in ((whole, nothing), (nothing, whole), (nothing, whole, nothing)):
        joined = qkv.merge(*parts)
        assert joined[0].tobytes() == whole[0].tobytes()
        assert joined[1].tobytes() == whole[1].tobytes()


def test_arguments_that_say_nothing_are_the_defaults() -> None:
    x = QUERY[:, :2]
    plain = qkv.attention(x, KEY, VALUE)
    said = qkv.attention(
        x, KEY, VALUE, scale=None, layout="bhld", q_offset=None, kv_offset=0, return_lse=False,
        backend="auto",
    )  # fmt: skip
    assert plain.tobytes() == said.tobytes()
    assert qkv.attention(x, KEY, VALUE, scale=8**-0.5).tobytes() == plain.tobytes()
