"""Sizes may be any of NumPy's integers: those without a sign have no negatives, which wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import qkv

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(1, 2, 16, 8))
BLOCKS, TABLE = np.eye(4, dtype=bool), RNG.normal(size=(8, 2))
VARIANTS: dict[str, Callable[[Any], Any]] = {
    "SlidingWindow": lambda kind: qkv.SlidingWindow(kind(3), kind(2)),
    "Strided": lambda kind: qkv.Strided(kind(3)),
    "Prefix": lambda kind: qkv.Prefix(kind(5)),
    "GlobalTokens": lambda kind: qkv.GlobalTokens([kind(1), kind(9)]),
    "KeyLengths": lambda kind: qkv.KeyLengths(kind(5)),
    "BlockSparse": lambda kind: qkv.BlockSparse(BLOCKS, kind(4), kind(4)),
    "RandomBlocks": lambda kind: qkv.RandomBlocks(kind(4), kind(1), kind(0)),
    "Segments": lambda kind: qkv.Segments.from_cu_seqlens([kind(0), kind(4), kind(16)]),
    "RelativeBias": lambda kind: qkv.RelativeBias(TABLE, True, kind(20)),
    "RoPE": lambda kind: qkv.RoPE(rotary_dim=kind(4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", VARIANTS)
def test_any_integer(name: str, backend: Any) -> None:
    variant = VARIANTS[name]
    expected = qkv.attention(ROWS, ROWS, ROWS, variant(int), backend="reference")
    for kind in (np.uint8, np.uint64, np.int8):
        out = qkv.attention(ROWS, ROWS, ROWS, variant(kind), backend=backend)
        np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-14)


def test_falling_ends_are_refused_without_a_sign_too() -> None:
    with pytest.raises(qkv.ShapeError, match="not a rising sequence"):
        qkv.Segments.from_cu_seqlens(np.array([0, 5, 3], np.uint8))


def test_segments_of_64_bits_with_and_without_a_sign() -> None:
    """2**64 - 1 and -1 have the same bits, and are two segments."""
    rows = RNG.normal(size=(3, 2))
    large = np.array([2**64 - 1, 2**64 - 1, 5], np.uint64)
    for q_ids, kv_ids in ((large, np.array([-1, -1, 5])), (np.array([-1, -1, 5]), large)):
        with pytest.raises(qkv.DTypeError, match="segment 18446744073709551615"):
            qkv.attention(rows, rows, rows, qkv.Segments(q_ids, kv_ids))
    expected = qkv.attention(rows, rows, rows, qkv.Segments([0, 0, 1]))
    same = qkv.Segments(large), qkv.Segments(large, large.copy()), qkv.Segments(
        np.array([7, 7, 5], np.uint64), np.array([7, 7, 5])
    )  # fmt: skip
    for segments in same:
        np.testing.assert_array_equal(qkv.attention(rows, rows, rows, segments), expected)


@pytest.mark.parametrize(("kind", "rows"), [(np.int8, 300), (np.uint8, 300), (np.int16, 2**15 + 2)])
def test_segments_may_be_longer_than_the_type_of_their_ids_counts(kind: Any, rows: int) -> None:
    query, key, value = RNG.normal(size=(3, rows, 2))
    some = np.array([0, 100, 127, 128, 255, 299, rows - 1])
    mask = qkv.Segments(np.zeros(len(some), kind), np.zeros(rows, kind)), qkv.SlidingWindow(40, 0)
    packed = qkv.Segments(np.zeros(rows, kind))
    out = qkv.attention(query, key, value, packed, qkv.SlidingWindow(40, 0))
    stepped = qkv.attention(query[-len(some) :], key, value, *mask, q_offset="end")
    ends = [*some, *range(rows - len(some), rows)]
    for end, row in zip(ends, [*out[some], *stepped], strict=True):
        seen = slice(max(0, end - 40), end + 1)
        scores = key[seen] @ query[end] / np.sqrt(2)
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(row, weights @ value[seen] / weights.sum(), rtol=1e-12)


@pytest.mark.parametrize("slopes", [8, np.int64(8), np.array(8), torch.tensor(8)], ids=repr)
def test_one_integer_is_no_slope(slopes) -> None:
    """Other libraries take the number of heads; an array of one integer was taken as a slope."""
    x = np.ones((1, 2, 3, 4))
    with pytest.raises(qkv.ArgumentError, match="slopes=8 is an integer"):
        qkv.attention(x, x, x, qkv.ALiBi(slopes))
