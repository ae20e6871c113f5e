"""Numbers at the ends of their types, on every instruction set: huge, tiny, infinite and NaN."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import qkv
from forced import as_it_runs, instruction_sets
from qkv.backends.cpu.passes.weight_blocks import WeightBlocks
from qkv.call.binding.bound import bind
from qkv.call.binding.options import OptionValues
from qkv.call.checked import check_call

EVERY_ISA = pytest.mark.parametrize("isa", instruction_sets())
BACKENDS = ("cpu", "blocked", "reference")


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def weights(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    scores = query.astype(float) @ key.astype(float).swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    exps = np.exp(scores - scores.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


@pytest.mark.parametrize("grows", [0.0, 2.0, 5.0])
@pytest.mark.parametrize("size", [1.0, 2.0**59, 2.0**62, 1e-20, 1e-32])
def test_values_that_tiles_cannot_multiply(
    monkeypatch: pytest.MonkeyPatch, size: float, grows: float
) -> None:
    """Larger scores may come later, so that the weights of earlier keys are rescaled."""
    monkeypatch.setenv("QKV_ISA", as_it_runs("amx"))
    rng = np.random.default_rng(1)
    query, key = normal(rng, 2, 192, 64), normal(rng, 2, 256, 64)
    key[:, 64:] *= 1 + grows
    value = (rng.uniform(1, 2, (2, 256, 64)) * size).astype(np.float32)
    expected = weights(query, key) @ value.astype(float)
    found = qkv.attention(query, key, value, backend="cpu")
    assert (np.abs(found - expected) <= 1e-5 * np.abs(expected)).all()
    value[:, 3, 5] = -1e19 * size
    expected = weights(query, key) @ value.astype(float)
    found = qkv.attention(query, key, value, qkv.Causal(), q_offset=300, backend="cpu")
    size_of_terms = weights(query, key) @ np.abs(value.astype(float))
    assert (np.abs(found - expected) <= 1e-5 * size_of_terms).all()


def test_forbidden_values_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forbidden pair stays one when weights are rescaled."""
    monkeypatch.setenv("QKV_ISA", as_it_runs("amx"))
    rng = np.random.default_rng(2)
    query, key, value = normal(rng, 2, 192, 64), normal(rng, 2, 256, 64), normal(rng, 2, 256, 64)
    key[:, 64:] *= 6
    value[:, 20] = np.inf
    allowed = np.ones((192, 256), bool)
    allowed[:, 20] = False
    found = qkv.attention(query, key, value, qkv.Mask(allowed), backend="cpu")
    kept = np.delete(np.arange(256), 20)
    expected = weights(query, key[:, kept]) @ value[:, kept].astype(float)
    np.testing.assert_allclose(found, expected, atol=2e-5)


@EVERY_ISA
def test_cotangents_that_are_nan(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv("QKV_ISA", isa)
    rng = np.random.default_rng(0)
    query, key, value = (normal(rng, 1, 192, 64) for _ in range(3))
    out, pull = qkv.vjp(query, key, value, backend="cpu")
    cotangent = np.zeros_like(out)
    cotangent[0, 7] = np.nan
    found = pull(cotangent)
    assert np.isnan(found.query[0, 7]).all()
    assert not np.isnan(np.delete(found.query, 7, axis=1)).any()
    assert np.isnan(found.value).all()


@EVERY_ISA
@pytest.mark.parametrize("size", [1e33, 1e36, 1e38])
def test_means_of_large_values_are_finite(
    monkeypatch: pytest.MonkeyPatch, isa: str, size: float
) -> None:
    monkeypatch.setenv("QKV_ISA", isa)
    query, key = np.zeros((1, 192, 64), np.float32), np.zeros((1, 256, 64), np.float32)
    query[..., 0], key[0, 64:, 0] = 1, 7
    for dtype in (ml_dtypes.bfloat16, np.float32):
        value = np.full((1, 256, 64), size, np.float32).astype(dtype)
        operands = query.astype(dtype), key.astype(dtype), value
        found = qkv.attention(*operands, scale=1.0, backend="cpu").astype(float)
        np.testing.assert_allclose(found, float(value[0, 0, 0]), rtol=2.0**-8)


@EVERY_ISA
@pytest.mark.parametrize("q_len", [1, 40])
def test_sums_of_int8_values_with_large_scales(
    monkeypatch: pytest.MonkeyPatch, isa: str, q_len: int
) -> None:
    monkeypatch.setenv("QKV_ISA", isa)
    values = np.full((1, 4, 16), 127, np.int8)
    values[0, 2:] = -127
    rows = qkv.Quantized(values, np.full((1, 4), 2e36, np.float32))
    query, key = np.zeros((1, q_len, 16), np.float16), np.zeros((1, 4, 16), np.float16)
    for backend in BACKENDS:
        found = qkv.attention(query, key, rows, backend=backend)
        np.testing.assert_array_equal(found, 0)


@EVERY_ISA
@pytest.mark.parametrize("q_len", [4, 32, 192])
def test_a_sink_of_infinity_takes_all(
    monkeypatch: pytest.MonkeyPatch, isa: str, q_len: int
) -> None:
    monkeypatch.setenv("QKV_ISA", isa)
    rng = np.random.default_rng(0)
    query, key, value = (normal(rng, 2, q_len, 64) for _ in range(3))
    sinks = qkv.Sinks(np.array([np.inf, 0.5], np.float32))
    for backend in BACKENDS:
        out, lse = qkv.attention(query, key, value, sinks, return_lse=True, backend=backend)
        assert (out[0] == 0).all()
        assert np.isposinf(lse[0]).all()
        out, pull = qkv.vjp(query, key, value, sinks, backend=backend)
        found = pull(np.ones_like(out))
        for gradient in (found.query, found.key, found.value):
            assert (gradient[0] == 0).all()
            assert np.isfinite(gradient[1]).all()


def test_maps_of_one_head_in_several_threads() -> None:
    rng = np.random.default_rng(0)
    query, key = normal(rng, 1, 4, 256, 16), normal(rng, 1, 4, 256, 16)
    call: Any = check_call(bind(query, key, key, (), OptionValues(backend="cpu")))
    _, lse, _ = call.compute(backward=False)
    blocks = WeightBlocks(call.problem, lse)
    expected = weights(query, key).reshape(4, 32, 8, 32, 8).max((2, 4))

    def head_is_right(n: int) -> bool:
        largest, _ = blocks(0, n % 4, slice(0, 256), slice(0, 256), 8) or (None, None)
        return bool(np.allclose(largest, expected[n % 4], atol=1e-5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(head_is_right, range(200)))
