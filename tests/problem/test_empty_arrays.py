"""Arrays with no rows, no heads or no batch entries: results of the right shape, and no failure."""

import numpy as np
import pytest

import qkv
from host_backends import HOST_BACKENDS

BACKENDS = pytest.mark.parametrize("backend", HOST_BACKENDS)
RNG = np.random.default_rng(0)
QUERY = RNG.normal(size=(2, 4, 21, 8)).astype(np.float32)
KEY = RNG.normal(size=(2, 2, 21, 8)).astype(np.float32)
VALUE = RNG.normal(size=(2, 2, 21, 6)).astype(np.float32)


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
    for call_variants in ((), variants):
        out, lse = qkv.attention(
            query, key, value, *call_variants, q_offset="end", backend=backend, return_lse=True
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


@pytest.mark.parametrize("batch", [(), (2,), (0,)])
def test_the_gradient_of_one_sink_of_no_heads(batch) -> None:
    query, sinks = np.ones((*batch, 0, 3, 4)), qkv.Sinks(0.5)
    out, pullback = qkv.vjp(query, query, query, sinks)
    assert pullback(out, wrt=[sinks]).of(sinks) == 0


def test_merge_with_attention_over_no_keys_changes_no_bit() -> None:
    whole = qkv.attention(QUERY, KEY, VALUE, return_lse=True)
    nothing = qkv.attention(QUERY, KEY[..., :0, :], VALUE[..., :0, :], return_lse=True)
    for parts in ((whole, nothing), (nothing, whole), (nothing, whole, nothing)):
        joined = qkv.merge(*parts)
        assert joined[0].tobytes() == whole[0].tobytes()
        assert joined[1].tobytes() == whole[1].tobytes()
