"""Where "end" is, if numbers of keys stand alone, and inside of `&`, `|` and `~`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import qkv

AT_END = qkv.Causal("end")

CASES: dict[str, tuple[Callable[[Any], tuple[Any, ...]], Callable[[Any, Any, Any, int], Any]]] = {
    "alone": (lambda n: (qkv.KeyLengths(n), AT_END), lambda i, j, n, end: j <= i + n),
    "and": (lambda n: (qkv.KeyLengths(n) & AT_END,), lambda i, j, n, end: j <= i + n),
    "or": (
        lambda n: (qkv.KeyLengths(n) | AT_END,), lambda i, j, n, end: (j <= i + end) | (j < n),
    ),
    "not": (
        lambda n: (~qkv.KeyLengths(n), AT_END), lambda i, j, n, end: (j <= i + end) & (j >= n),
    ),
    "not, one": (
        lambda n: (~qkv.KeyLengths(2), AT_END), lambda i, j, n, end: (j <= i + end) & (j >= 2),
    ),
    "both": (
        lambda n: (qkv.KeyLengths(15), ~qkv.KeyLengths(n), AT_END),
        lambda i, j, n, end: (j <= i + 15) & (j >= n),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("lengths", [[3], [3, 1]], ids=["one row", "two rows"])
def test_steps_of_rising_lengths(name: str, q_len: int, lengths: list[int]) -> None:
    made, rule = CASES[name]
    real = np.array(lengths)
    rng = np.random.default_rng(0)
    for kv_len in range(20, 28):
        q = rng.normal(size=(len(real), 2, q_len, 8))
        k, v = rng.normal(size=(2, len(real), 2, kv_len, 8))
        row, key = np.arange(q_len)[:, None] - q_len, np.arange(kv_len)
        allowed = rule(row, key, real[:, None, None, None], kv_len)
        scores = np.where(allowed, q @ k.mT / np.sqrt(8), -np.inf)
        powers = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e300))
        sums = powers.sum(-1, keepdims=True)
        right = powers / np.where(sums > 0, sums, 1) @ v
        np.testing.assert_allclose(qkv.attention(q, k, v, *made(real)), right, rtol=0, atol=1e-12)
