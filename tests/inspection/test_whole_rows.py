"""Whole rows of the weights add up to 1, whatever multiplied them in the call."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import qkv
from forced import as_it_runs

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ["amx", "avx2"])
def test_whole_rows_add_up_to_one(
    isa: str, dtype: str, monkeypatch: pytest.MonkeyPatch, no_prepared_calls: None
) -> None:
    """Less the sinks: of scores near 60, whose rounding in the kernel would show as 1e-5."""
    monkeypatch.setenv("QKV_ISA", as_it_runs(isa))
    rng = np.random.default_rng(3)
    shapes = ((1, 2, 70, 64), (1, 1, 200, 64), (1, 1, 200, 64))
    q, k, v = ((4 * rng.normal(size=shape)).astype(DTYPES[dtype]) for shape in shapes)
    sinks = np.array([40.0, 1.0])
    weights = qkv.inspect(q, k, v, qkv.Causal(), qkv.Sinks(sinks), q_offset=100).weights

    scores = q.astype(float)[0] @ k.astype(float)[0].swapaxes(-1, -2) / 8
    scores[:, np.arange(70)[:, None] + 100 < np.arange(200)] = -np.inf
    lse = np.logaddexp(np.logaddexp.reduce(scores, axis=-1), sinks[:, None])
    weights_of_keys = np.exp(scores - lse[..., None])
    without_sink = weights_of_keys.sum(-1) > 1 - 1e-8
    assert 10 < without_sink.sum() < without_sink.size

    order = rng.permutation(200)
    for found in (weights[0], weights[0][..., order], weights[..., order][0]):
        sums = found.astype(float).sum(-1)
        np.testing.assert_allclose(sums[without_sink], 1, rtol=0, atol=1e-6)
    np.testing.assert_allclose(weights[0], weights_of_keys, rtol=0, atol=2e-5)
