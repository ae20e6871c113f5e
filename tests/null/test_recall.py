"""Calls like an earlier one skip the checks: what they give must not change."""

import numpy as np
import pytest

import qkv
from qkv import _recall
from qkv.errors import ArgumentError


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.fixture(autouse=True)
def nothing_remembered():
    _recall._prepared.clear()
    _recall._seen.clear()


def dense(query, key, value, allowed=None):
    """The definition in float64, one head after the other."""
    query, key, value = (a.astype(np.float64) for a in (query, key, value))
    key, value = (np.repeat(a, query.shape[-3] // a.shape[-3], axis=-3) for a in (key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_remembered_call_reads_its_own_arrays(dtype) -> None:
    for seed in range(6):
        arrays = [normal(2, heads, 21, 9, seed=seed, dtype=dtype) for heads in (4, 2, 2)]
        found, lse = qkv.attention(*arrays, qkv.Causal(), return_lse=True, backend="cpu")
        again = qkv.attention(*arrays, qkv.Causal(), backend="cpu")
        expected = dense(*arrays, np.tri(21, dtype=bool))
        np.testing.assert_allclose(found, expected, atol=2e-3 if dtype == np.float16 else 2e-6)
        assert again.tobytes() == found.tobytes()
        assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert len(_recall._prepared) == 1


def test_what_is_different_is_not_alike() -> None:
    query = normal(1, 2, 8, 4)
    _alike(query)
    key = normal(1, 2, 9, 4)
    for seed in range(3):
        _alike(query + seed)
    assert qkv.attention(query, key, key, qkv.Causal("end")).shape == query.shape
    with pytest.raises(ArgumentError):
        qkv.attention(query, query, query, q_offset=0.0)
    with pytest.raises(ArgumentError):
        qkv.attention(query, query, query, kv_offset=False + 0.0)
    with pytest.raises(TypeError):
        qkv.attention(query, query, query, unknown=1)
    for scale in (0.1, 0.9):
        np.testing.assert_allclose(
            qkv.attention(query, query, query, scale=scale),
            dense(query * np.float32(scale * 2), query, query),
            atol=1e-6,
        )


def _alike(query) -> None:
    np.testing.assert_allclose(
        qkv.attention(query, query, query), dense(query, query, query), atol=1e-6
    )


def test_arrays_in_variants_are_read_each_time() -> None:
    query = normal(1, 2, 8, 4)
    mask = np.tri(8, dtype=bool)
    for allowed in (mask, np.ones((8, 8), bool), mask):
        np.testing.assert_allclose(
            qkv.attention(query, query, query, qkv.Mask(allowed)),
            dense(query, query, query, allowed),
            atol=1e-6,
        )
    mask[:] = True
    found = qkv.attention(query, query, query, mask)
    np.testing.assert_allclose(found, dense(query, query, query), atol=1e-6)
    assert not _recall._prepared


def test_strides_are_part_of_it() -> None:
    wide = normal(2, 2, 16, 8)
    for view in (wide, wide[:, :, ::2], wide[:, :, ::-1], wide[..., ::2], wide[:, ::-1]):
        for _ in range(3):
            _alike(view)
    broadcast = np.broadcast_to(normal(1, 2, 16, 8), (3, 2, 16, 8))
    for _ in range(3):
        _alike(broadcast)


def test_few_are_kept() -> None:
    key = normal(1, 1, 2 * _recall.KEPT, 2)
    for length in range(1, 2 * _recall.KEPT):
        part = key[:, :, :length]
        for _ in range(2):
            qkv.attention(key, part, part)
    assert len(_recall._prepared) == len(_recall._seen) == _recall.KEPT


def test_a_registered_backend_is_seen() -> None:
    from qkv.backends import register, unregister
    from qkv.backends.reference import ReferenceBackend

    class Loud(ReferenceBackend):
        name = "loud"
        priority = 1000
        calls = 0

        def run(self, problem):
            Loud.calls += 1
            return super().run(problem)

    query = normal(1, 2, 8, 4)
    for _ in range(3):
        _alike(query)
    register(Loud())
    try:
        _alike(query)
    finally:
        unregister("loud")
    assert Loud.calls == 1


def test_another_machine_is_seen(monkeypatch) -> None:
    from qkv.backends.cpu.host import host

    query = normal(1, 2, 8, 4)
    for _ in range(3):
        _alike(query)
    monkeypatch.setenv("QKV_ISA", "no such thing")
    with pytest.raises(ArgumentError, match="no such thing"):
        host()
    with pytest.raises((ArgumentError, qkv.errors.UnsupportedError)):
        qkv.attention(query, query, query, backend="cpu")
