"""Reductions of weights over blocks, beside those of weights from the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import qkv
from qkv.backends import Inspectable, choose


def folded(weights: Any, block: int) -> tuple[Any, Any]:
    """Largest and sum of each block, by a loop over blocks."""
    rows, columns = (range(0, length, block) for length in weights.shape)
    parts = [[weights[i : i + block, j : j + block] for j in columns] for i in rows]
    return (
        np.array([[part.max() for part in line] for line in parts]),
        np.array([[part.sum() for part in line] for line in parts]),
    )


def dense_weights(q: Any, k: Any, mask: Any, bias: Any = 0.0) -> Any:
    """`softmax(q k^T / sqrt(d) + bias)` over what the mask allows, in float64."""
    scores = q.astype(float) @ k.astype(float).T / np.sqrt(q.shape[-1]) + bias
    scores = np.where(mask, scores, -np.inf)
    exp = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def reducing(record: Any) -> Any:
    replay = record.weights.replay
    backend = choose(replay.problem.spec).backend
    assert isinstance(backend, Inspectable)
    return backend.weight_blocks(replay.problem, replay.lse)


@pytest.mark.slow
@pytest.mark.parametrize("block", [2, 8, 16, 64])
@pytest.mark.sampled("dtype", ["float32", "float64"], one_in=2)
def test_blocks_of_a_masked_head(block: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, n, 24)).astype(dtype) for n in (333, 501))
    variants = qkv.Causal(), qkv.SlidingWindow(120, 0), qkv.ALiBi(np.array([0.1, 0.01], dtype))
    record = qkv.inspect(q, k, k, *variants, q_offset="end")
    reduce = reducing(record)
    q_pos, kv_pos = np.arange(168, 501)[:, None], np.arange(501)
    mask = (kv_pos <= q_pos) & (kv_pos >= q_pos - 120)
    for head, slope in ((0, 0.1), (1, 0.01)):
        exact = dense_weights(q[head], k[head], mask, -slope * (q_pos - kv_pos))
        for q_rows, kv_rows in (
            (slice(0, 333), slice(0, 501)),
            (slice(128, 333), slice(64, 448)),
            (slice(192, 256), slice(320, 330)),
        ):
            largest, sums = reduce(0, head, q_rows, kv_rows, block)
            expected = folded(exact[q_rows, kv_rows], block)
            accuracy = 2e-5 if dtype == "float32" else 1e-12
            np.testing.assert_allclose(largest, expected[0], rtol=accuracy, atol=1e-9)
            np.testing.assert_allclose(sums, expected[1], rtol=accuracy, atol=1e-9)


def test_grouped_heads_batches_and_rows_without_keys() -> None:
    rng = np.random.default_rng(1)
    q = rng.normal(size=(2, 4, 70, 8)).astype(np.float32)
    k = rng.normal(size=(2, 2, 70, 8)).astype(np.float32)
    mask = rng.random((70, 70)) < 0.3
    mask[10:40] = False
    record = qkv.inspect(q, k, k, mask)
    largest, sums = reducing(record)(1, 3, slice(0, 70), slice(0, 70), 16)
    with np.errstate(invalid="ignore"):
        exact = np.nan_to_num(dense_weights(q[1, 3], k[1, 1], mask))
    expected = folded(exact, 16)
    np.testing.assert_allclose(largest, expected[0], rtol=2e-5, atol=1e-9)
    np.testing.assert_allclose(sums, expected[1], rtol=2e-5, atol=1e-9)


def test_bands_and_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    q, k = rng.normal(size=(2, 400, 8)).astype(np.float32)
    reduce = reducing(qkv.inspect(q, k, k))
    whole = reduce(0, 0, slice(0, 400), slice(0, 400), 32)
    monkeypatch.setattr("qkv.backends.cpu.passes.weight_blocks._BAND_BYTES", 1)
    before = qkv.get_num_threads()
    qkv.set_num_threads(2)
    try:
        again = reduce(0, 0, slice(0, 400), slice(0, 400), 32)
    finally:
        qkv.set_num_threads(before)
    for a, b in zip(whole, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("first", "block"), [(0, 1), (0, 12), (8, 16)])
def test_what_does_not_fit_is_left_to_the_caller(first: int, block: int) -> None:
    x = np.eye(40, dtype=np.float32)
    reduce = reducing(qkv.inspect(x, x, x))
    assert reduce(0, 0, slice(first, 40), slice(0, 40), block) is None


def test_a_row_of_nan_counts_as_nothing() -> None:
    x = np.random.default_rng(3).normal(size=(64, 8)).astype(np.float32)
    broken = x.copy()
    broken[5] = np.nan
    largest, sums = reducing(qkv.inspect(broken, x, x))(0, 0, slice(0, 64), slice(0, 64), 32)
    exact = dense_weights(x, x, True)
    exact[5] = 0
    expected = folded(exact, 32)
    np.testing.assert_allclose(largest, expected[0], rtol=2e-5)
    np.testing.assert_allclose(sums, expected[1], rtol=2e-5)
