"""Weights of a row add up to 1, whatever multiplied them in the call and however they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import qkv
from forced import as_it_runs
from qkv.hf import LayerCall, LayerWeights
from qkv.inspection.models.model_record import ModelRecord

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SINKS = np.array([40.0, 1.0])
KEYS = 1100
"""More than a tile of the statistics that NumPy computes."""
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-6}

Reading = Callable[[Any, int], np.ndarray]
"""A way to read weights (2, queries, keys) at a query: all weights of both heads (2, keys)."""
READINGS: dict[str, Reading] = {
    "whole": lambda w, i: w[:, i],
    "in parts": lambda w, i: np.concatenate(
        [w[:, i, j : j + 100] for j in range(0, KEYS, 100)], -1
    ),
    "in parts of many rows": lambda w, i: np.concatenate(
        [w[:, i - 3 :, j : j + 77][:, 3] for j in range(0, KEYS, 77)], -1
    ),
    "one by one": lambda w, i: np.array([[w[h, i, j] for j in range(KEYS)] for h in range(2)]),
    "in pairs": lambda w, i: np.array([w[h, np.full(KEYS, i), np.arange(KEYS)] for h in range(2)]),
    "backwards": lambda w, i: w[:, i, ::-1][:, ::-1],
}


def arrays(dtype: Any, queries: int = 70, keys: int = KEYS) -> list[np.ndarray]:
    """Scores reach 80, whose rounding in a kernel shows as 1e-5 in `exp(s - lse)`."""
    rng = np.random.default_rng(3)
    shapes = ((1, 2, queries, 64), (1, 1, keys, 64), (1, 1, keys, 64))
    return [(4 * rng.normal(size=shape)).astype(dtype) for shape in shapes]


def definition(q: np.ndarray, k: np.ndarray, first: int) -> np.ndarray:
    """Weights (2, queries, keys), row by row in float64: causal from `first` on, with sinks."""
    found = np.zeros((2, q.shape[2], k.shape[2]))
    for h in range(2):
        for i, row in enumerate(q[0, h].astype(float)):
            scores = k[0, 0, : first + i + 1].astype(float) @ row / 8
            lse = np.logaddexp(np.logaddexp.reduce(scores), SINKS[h])
            found[h, i, : first + i + 1] = np.exp(scores - lse)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ["amx", "avx2"])
def test_rows_add_up_to_one_however_they_are_read(
    isa: str, dtype: str, monkeypatch: pytest.MonkeyPatch, no_prepared_calls: None
) -> None:
    """Rows add up to one less the sinks, in all kernels, and through NumPy, torch and JAX."""
    monkeypatch.setenv("QKV_ISA", as_it_runs(isa))
    q, k, v = arrays(DTYPES[dtype])
    first = KEYS - 80
    expected = definition(q, k, first)
    all_weight = expected.sum(-1)
    alone = all_weight > 1 - 1e-8
    assert 10 < alone.sum() < all_weight.size

    def inspected(q: Any, k: Any, v: Any) -> Any:
        return qkv.inspect(q, k, v, qkv.Causal(), qkv.Sinks(SINKS), q_offset=first)

    records = [inspected(q, k, v)]
    if isa == "amx":
        records += [inspected(*tensors(dtype, q, k, v)), inspected(*map(jnp.asarray, (q, k, v)))]
    for n, record in enumerate(records):
        weights, of_heads = record.weights, _Heads(record.weights)
        for name, read in READINGS.items():
            if n and name == "one by one":
                continue
            found = read(of_heads, 40).astype(float)
            np.testing.assert_allclose(found.sum(-1), all_weight[:, 40], **CLOSE, err_msg=name)
            np.testing.assert_allclose(found, expected[:, 40], rtol=0, atol=1e-5)
        for sums in (
            weights.sum(-1, dtype=float),
            weights.mean(-1) * KEYS,
            record.mass(slice(None)),
        ):
            np.testing.assert_allclose(sums[0][alone], 1, **CLOSE)
            np.testing.assert_allclose(sums[0], all_weight, rtol=1e-5)


def tensors(dtype: str, *given: np.ndarray) -> list[torch.Tensor]:
    return [torch.tensor(a.astype(np.float32)).to(getattr(torch, dtype)) for a in given]


class _Heads:
    """Lazy weights (1, 2, queries, keys) without their first dimension."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
        return np.asarray(self.weights[(0, *index)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_read_by_models_add_up_to_one(
    dtype: str, monkeypatch: pytest.MonkeyPatch, no_prepared_calls: None
) -> None:
    """`LayerWeights` of transformers, and the weights that a record of a model keeps."""
    monkeypatch.setenv("QKV_ISA", as_it_runs("amx"))
    q, k, v = arrays(DTYPES[dtype])
    variants, first = (qkv.Causal(), qkv.Sinks(SINKS)), KEYS - 80
    all_weight = definition(q, k, first).sum(-1)
    kept = ModelRecord("m", keep="weights")
    kept.add(q, k, *variants, q_offset=first, name="layer 0")
    call = LayerCall(torch.nn.Identity(), *tensors(dtype, q, k, v), variants, None, first, 0)
    for weights in (kept[0].weights, LayerWeights(call)):
        for name in ("whole", "in parts", "in parts of many rows", "in pairs"):
            found = READINGS[name](_Heads(weights), 40).astype(float)
            np.testing.assert_allclose(found.sum(-1), all_weight[:, 40], **CLOSE, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_received_weight_and_best_keys_add_up_on_tiles(
    dtype: str, monkeypatch: pytest.MonkeyPatch, no_prepared_calls: None
) -> None:
    """Each query has a segment of its own, so that what its keys receive is its row."""
    monkeypatch.setenv("QKV_ISA", as_it_runs("amx"))
    q, k, v = (3 * a / 4 for a in arrays(np.float32, 64, 640))
    segments = qkv.Segments(np.arange(64), np.arange(640) // 10)
    record = qkv.inspect(*(a.astype(DTYPES[dtype]) for a in (q, k, v)), segments)
    received = record.received[0].astype(float).reshape(2, 64, 10).sum(-1)
    assert (np.abs(record.lse) < 33).mean() > 0.5  # Rows of larger lse are summed in any case.
    # Rounding takes 2e-6 from an lse of 33.
    np.testing.assert_allclose(received, 1, rtol=0, atol=2e-6)
    np.testing.assert_allclose(record.top(10)[1].astype(float).sum(-1), 1, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
def test_parts_of_rows_that_few_keys_or_none_are_left_of(backend: str) -> None:
    """Whole matrices say the same: biases of -1e9 and lower, windows, empty rows, NaN, infinity."""
    rng = np.random.default_rng(1)
    q, k = (rng.normal(size=(2, n, 8)).astype(np.float32) for n in (40, 60))
    bias = rng.choice([0.0, -1e9, -3e38, -np.inf], size=(40, 60)).astype(np.float32)
    bias[3], bias[4], bias[5] = -1e9, -3e38, -np.inf
    k[:, 50], q[:, 7] = np.nan, np.inf
    variants = (qkv.SlidingWindow(9, 0), bias)
    weights = qkv.inspect(q, k, k, *variants, q_offset=15, backend=backend).weights
    with np.errstate(all="ignore"):
        scores = (q.astype(float) @ k.astype(float).swapaxes(-1, -2) / 8**0.5).astype(np.float32)
        scores = scores + bias
        ahead = np.arange(40)[:, None] + 15 - np.arange(60)
        scores[:, (ahead < 0) | (ahead > 9) | np.isneginf(bias)] = -np.inf
        shift = np.where(np.isneginf(scores.max(-1)), 0, scores.max(-1)).astype(float)
        exp = np.exp(scores - shift[..., None])
        expected = exp / np.where(exp.sum(-1) == 0, 1, exp.sum(-1))[..., None]
    expected[np.isneginf(scores)] = 0
    for step in (7, 60):
        parts = [weights[..., j : j + step] for j in range(0, 60, step)]
        found = np.concatenate(parts, -1)
        np.testing.assert_allclose(found, expected, rtol=3e-6, atol=1e-7)
    diagonal = weights[:, np.arange(40), np.arange(40) + 15]
    np.testing.assert_allclose(
        diagonal, expected[:, np.arange(40), np.arange(40) + 15], rtol=3e-6, atol=1e-7
    )


def test_a_weight_is_one_number_however_it_is_asked_for() -> None:
    """Products of NumPy depend on their shapes; those of parts of rows are rounded once."""
    q, k, v = arrays(np.float32, 70, 300)
    weights = qkv.inspect(q, k, v, qkv.Causal(), q_offset=230).weights
    parts = weights[0, :, :, :299]
    np.testing.assert_array_equal(weights[0, :, 3:5, 40:50], parts[:, 3:5, 40:50])
    np.testing.assert_array_equal(weights[0, 1, 3, 40:50], parts[1, 3, 40:50])
    np.testing.assert_array_equal(
        weights[0, 1, [3, 9, 69], [0, 2, 298]], parts[1, [3, 9, 69], [0, 2, 298]]
    )
    assert weights[0, 1, 3, 233] == parts[1, 3, 233]
