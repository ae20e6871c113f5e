"""Segments over the tokens of a cache: positions begin again in each segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import qkv

LENGTH = 11
IDS = np.array([[3] * 4 + [5] * 7, [1, 1, 7, 7, 7, 7, 7, 7, 7, 9, 9]])
Q, K, V = np.random.default_rng(0).normal(size=(3, 2, 2, LENGTH, 8))
SLOPES = (0.5, 0.25)

CACHES: dict[str, Callable[[], Any]] = {
    "contiguous": qkv.cache.ContiguousCache,
    "full pages": lambda: qkv.cache.PagedCache(page_size=11),
    "pages": lambda: qkv.cache.PagedCache(page_size=4),
    "rolling": lambda: qkv.cache.RollingCache(window=LENGTH + 1),
}
of_caches = pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())

VARIANTS: dict[str, tuple[tuple[Any, ...], Callable[[int, int, int], float]]] = {
    "causal": ((qkv.Causal(),), lambda h, i, j: 0.0 if j <= i else -np.inf),
    "causal at the end": ((qkv.Causal("end"),), lambda h, i, j: 0.0 if j <= i else -np.inf),
    "window": ((qkv.SlidingWindow(1, 0),), lambda h, i, j: 0.0 if 0 <= i - j <= 1 else -np.inf),
    "prefix": (
        (qkv.Causal() | qkv.Prefix(2),), lambda h, i, j: 0.0 if j <= i or j < 2 else -np.inf,
    ),
    "slopes": ((qkv.ALiBi(np.array(SLOPES)),), lambda h, i, j: -SLOPES[h] * abs(i - j)),
}  # fmt: skip
"""Variants, and what they add for a head and positions in a segment."""
of_variants = pytest.mark.parametrize("name", VARIANTS)


def expected(name: str, batch: int, length: int) -> np.ndarray:
    """Attention among the first tokens of a sequence, by its definition."""
    ids = IDS[batch, :length].tolist()
    positions = [ids[:i].count(own) for i, own in enumerate(ids)]
    out = np.zeros((2, length, 8))
    for head, i in np.ndindex(2, length):
        scores = np.full(length, -np.inf)
        for j in range(length):
            if ids[i] == ids[j]:
                product = K[batch, head, j] @ Q[batch, head, i] / np.sqrt(8)
                scores[j] = product + VARIANTS[name][1](head, positions[i], positions[j])
        weights = np.exp(scores)
        out[head, i] = weights / weights.sum() @ V[batch, head, :length]
    return out


@of_variants
@of_caches
@pytest.mark.parametrize("new", [1, 2, 6])
def test_the_last_tokens(cache: Callable[[], Any], name: str, new: int) -> None:
    """The positions of queries were counted from the start of the cache: later keys were read."""
    first, held = LENGTH - new, cache()
    held.append(K[:, :, :first], V[:, :, :first])
    rows = held.append(K[:, :, first:], V[:, :, first:])
    segments = qkv.Segments(IDS[:, first:], IDS)
    right = np.stack([expected(name, batch, LENGTH) for batch in range(2)])[:, :, first:]
    for where in (None, "end", first):
        found = rows.attention(Q[:, :, first:], segments, *VARIANTS[name][0], q_offset=where)
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-12)
    joined = rows.attention(Q[:, :, first:], segments & qkv.Causal(), q_offset="end")
    causal = np.stack([expected("causal", batch, LENGTH) for batch in range(2)])[:, :, first:]
    np.testing.assert_allclose(joined, causal, rtol=0, atol=1e-12)


@of_variants
@pytest.mark.parametrize("name_of_cache", ["contiguous", "pages"])
def test_sequences_of_several_lengths(name_of_cache: str, name: str) -> None:
    """Rows behind the end of the shorter one have ids, but are in none of its segments."""
    lens, cache = np.array([LENGTH, 6]), CACHES[name_of_cache]()
    cache.append(K[:, :, :-1], V[:, :, :-1], new_lens=lens - 1)
    last = [np.stack([a[0, :, 10:11], a[1, :, 5:6]]) for a in (Q, K, V)]
    rows = cache.append(*last[1:])
    own = np.array([[IDS[0, 10]], [IDS[1, 5]]])
    found = rows.attention(last[0], qkv.Segments(own, IDS), *VARIANTS[name][0])
    for batch, length in enumerate(lens):
        right = expected(name, batch, length)[:, -1:]
        np.testing.assert_allclose(found[batch], right, rtol=0, atol=1e-12)


def test_steps_of_a_cache_that_drops_tokens() -> None:
    cache = qkv.cache.RollingCache(window=3)
    for i in range(LENGTH):
        rows = cache.append(K[:1, :, i : i + 1], V[:1, :, i : i + 1])
        ids = IDS[0, rows.kv_offset : i + 1]
        segments = qkv.Segments(ids[-1:], ids)
        found = rows.attention(Q[:1, :, i : i + 1], segments, qkv.SlidingWindow(1, 0))
        right = expected("window", 0, LENGTH)[None, :, i : i + 1]
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-12)
    for variant in (qkv.Causal() | qkv.Prefix(2), qkv.RandomBlocks(2, 1)):
        with pytest.raises(
            qkv.UnsupportedError, match=r"from which (Prefix|RandomBlocks)\(2.* counts"
        ):
            rows.attention(Q[:1, :, -1:], segments, variant)


def test_tokens_in_the_middle_have_no_position_in_each_segment() -> None:
    rows = qkv.cache.ContiguousCache().append(K, V)
    segments = qkv.Segments(IDS[:, 3:5], IDS)
    for variant in (qkv.Causal(), qkv.RandomBlocks(2, 1)):
        with pytest.raises(qkv.UnsupportedError, match="neither the first nor the last tokens"):
            rows.attention(Q[:, :, 3:5], segments, variant, q_offset=3)
    first = rows.attention(Q[:, :, :2], qkv.Segments(IDS[:, :2], IDS), qkv.Causal(), q_offset=0)
    for batch in range(2):
        right = expected("causal", batch, LENGTH)[:, :2]
        np.testing.assert_allclose(first[batch], right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("last", [np.int64(2**63 - 1), np.uint64(2**64 - 1)])
def test_the_largest_ids(last: Any) -> None:
    """The rows behind the last token had an id of their own that was larger than all others."""
    ids = np.array([0] * 4 + [last] * 7, last.dtype)
    rows = qkv.cache.PagedCache(page_size=4).append(K, V)
    out = rows.attention(Q, qkv.Segments(ids), qkv.Causal())
    segments = qkv.Segments(np.array([0] * 4 + [1] * 7))
    np.testing.assert_allclose(out, qkv.attention(Q, K, V, segments, qkv.Causal()), atol=1e-12)
