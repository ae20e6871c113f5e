"""Steps whose rows stand somewhere else each time: by segments, or by a stated position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.call.repeated.cache import CALLS

pytestmark = pytest.mark.usefixtures("no_prepared_calls")

ARRAYS = pytest.mark.parametrize("arrays", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def rotated(rows: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """Rotary embedding in halves, in float64."""
    half = rows.shape[-1] // 2
    angles = positions[:, None] * base ** (-np.arange(half) / half)
    first, second = rows[..., :half].astype(float), rows[..., half:].astype(float)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(query: Any, key: Any, value: Any, allowed: Any) -> np.ndarray:
    scores = query.astype(float) @ key.astype(float).swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    weights = np.where(allowed, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, where=total > 0, out=0 * weights) @ value.astype(float)


def ranks(ids: np.ndarray) -> np.ndarray:
    """How many rows of the same segment come before each row."""
    return np.array([np.sum(ids[:n] == ids[n]) for n in range(len(ids))])


@ARRAYS
@pytest.mark.parametrize("q_len", [1, 2])
def test_rotation_restarts_in_each_segment(arrays: Callable[[Any], Any], q_len: int) -> None:
    rng = np.random.default_rng(0)
    q_ids, kv_ids = np.zeros(q_len, int), np.sort(rng.integers(0, 3, 130))
    for call in range(8):
        if call > 4:
            q_ids, kv_ids = np.full(q_len, call % 3), np.sort(rng.integers(0, 3, 130))
        operands = [normal(rng, 1, heads, n, 64) for heads, n in ((2, q_len), (1, 130), (1, 130))]
        variants = qkv.Segments(q_ids, kv_ids), qkv.RoPE(base=100.0)
        found = qkv.attention(*map(arrays, operands), *variants, q_offset="start")
        query = rotated(operands[0], ranks(q_ids), 100.0)
        key = rotated(operands[1], ranks(kv_ids), 100.0)
        expected = attention(query, key, operands[2], q_ids[:, None] == kv_ids)
        np.testing.assert_allclose(np.asarray(found), expected, atol=2e-5)


@ARRAYS
@pytest.mark.parametrize(
    ("batch", "paged"), [((), False), ((1,), False), ((2,), False), ((1,), True), ((2,), True)]
)
def test_a_stated_position_of_each_batch_row(
    arrays: Callable[[Any], Any], batch: tuple[int, ...], paged: bool
) -> None:
    """All rows may stand at the same position when the step is prepared, and not later."""
    rng = np.random.default_rng(0)
    for call in range(8):
        kv_len = 96 if paged else 100 + call
        query, key, value = (
            normal(rng, *batch, heads, n, 16) for heads, n in ((2, 1), (1, kv_len), (1, kv_len))
        )
        lens = np.full(batch, 80 + call)
        start = np.full(batch, 10) if call < 4 else np.asarray(rng.integers(0, 60, batch))
        rows: Any = [arrays(key), arrays(value)]
        if paged:
            table = rng.permutation(6 * batch[0]).reshape(batch[0], 6)
            rows = []
            for dense in (key, value):
                pages = np.empty((6 * batch[0], 1, 16, 16), np.float32)
                pages[table] = dense.reshape(batch[0], 1, 6, 16, 16).swapaxes(1, 2)
                rows.append(qkv.Paged(arrays(pages), table))
        found = qkv.attention(
            arrays(query), *rows, qkv.Causal(), qkv.KeyLengths(lens), q_offset=start
        )
        keys = np.arange(kv_len)
        allowed = (keys <= start[..., None]) & (keys < lens[..., None])
        expected = attention(query, key, value, allowed[..., None, None, :])
        np.testing.assert_allclose(np.asarray(found), expected, atol=2e-6)


@ARRAYS
def test_positions_of_each_batch_row_far_from_0(arrays: Callable[[Any], Any]) -> None:
    """A step whose integers have 32 bits does not take positions whose triple has more."""
    rng = np.random.default_rng(0)
    far = qkv.ScoreMod(lambda score, b, h, i, j: np.where(3 * i > j, score, -np.inf))
    for call in range(8):
        start = np.array([2**30 if call > 4 else 15, -(2**30) if call > 5 else 5])
        operands = [normal(rng, 2, 2, n, 16) for n in (1, 100 + call, 100 + call)]
        lens = np.full(2, 90 + call)
        found = qkv.attention(*map(arrays, operands), far, qkv.KeyLengths(lens), q_offset=start)
        keys = np.arange(100 + call)
        allowed = (keys < 3 * start[:, None]) & (keys < lens[:, None])
        expected = attention(*operands, allowed[:, None, None])
        np.testing.assert_allclose(np.asarray(found), expected, atol=2e-6)


@ARRAYS
def test_the_least_integer_is_no_position(arrays: Callable[[Any], Any]) -> None:
    """The magnitude of this number has more than 64 bits."""
    rng = np.random.default_rng(0)
    operands = [arrays(normal(rng, 2, 2, n, 16)) for n in (1, 100, 100)]
    variants = qkv.Causal(), qkv.KeyLengths(np.full(2, 90))
    for _ in range(4):
        qkv.attention(*operands, *variants, q_offset=np.array([15, 5]))
    with pytest.raises(qkv.ArgumentError, match="q_offset reaches beyond"):
        qkv.attention(*operands, *variants, q_offset=np.full(2, -(2**63)))


@ARRAYS
def test_positions_without_a_sign_are_prepared(arrays: Callable[[Any], Any]) -> None:
    """NumPy warned in every call of the least of them, taken negative."""
    rng = np.random.default_rng(0)
    for call in range(4):
        operands = [normal(rng, 2, 2, n, 16) for n in (1, 100 + call, 100 + call)]
        lens, start = np.full(2, 90), np.array([15, 5 + call], np.uint64)
        variants = qkv.Causal(), qkv.KeyLengths(lens)
        found = qkv.attention(*map(arrays, operands), *variants, q_offset=start)
        allowed = np.arange(100 + call) <= start[:, None]
        expected = attention(*operands, allowed[:, None, None])
        np.testing.assert_allclose(np.asarray(found), expected, atol=2e-6)
    assert len(CALLS) == 1


@pytest.mark.parametrize("make", ["fortran", "broadcast", "expand", "t"])
def test_page_tables_in_any_order(make: str) -> None:
    rng = np.random.default_rng(0)
    pages = [normal(rng, 40, 2, 16, 32) for _ in range(2)]
    query = normal(rng, 3, 4, 1, 32)
    table = rng.integers(0, 40, (3, 8))
    given: Any = np.asfortranarray(table)
    if make in ("broadcast", "expand"):
        table = np.broadcast_to(table[:1], (3, 8))
        given = table if make == "broadcast" else torch.from_numpy(table[0].copy()).expand(3, 8)
    elif make == "t":
        given = torch.from_numpy(table.T.copy()).t()
    key, value = (
        np.repeat(each[table].swapaxes(1, 2).reshape(3, 2, 128, 32), 2, axis=1) for each in pages
    )
    expected = attention(query, key, value, True)
    torch_too = isinstance(given, torch.Tensor)
    arrays: Any = torch.from_numpy if torch_too else np.asarray
    for _ in range(4):
        rows = [qkv.Paged(arrays(each), given) for each in pages]
        found = qkv.attention(arrays(query), *rows)
        np.testing.assert_allclose(np.asarray(found), expected, atol=2e-6)
