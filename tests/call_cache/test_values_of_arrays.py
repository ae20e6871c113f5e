"""Prepared calls depend on no value of an array that each call brings.

Nothing is kept of these arrays but types, sizes and strides. Here what stands for them holds
numbers, as the memory behind it may, that would change results if they were read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import qkv
from qkv.backends.cpu.plan import block_skipping
from qkv.backends.cpu.prepared import backward, placeholders, stages

pytestmark = pytest.mark.usefixtures("no_prepared_calls")


@pytest.fixture(autouse=True)
def _readable_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    def falling(array: np.ndarray) -> np.ndarray:
        numbers = np.arange(array.size)
        memory = np.where(numbers < 64, -1000 * numbers, 0)
        return memory.astype(array.dtype).reshape(array.shape)

    for module in (placeholders, backward, stages):
        monkeypatch.setattr(module, "placeholder", falling)


@dataclass(frozen=True, eq=False)
class Added:
    """Adds three times one of 61 whole numbers."""

    roles: ClassVar = {"numbers": "in_place"}
    numbers: Any

    def lower(self, builder: Any) -> None:
        table = builder.table(self.numbers, "numbers")
        builder.mod(builder.score + table[(builder.q_index + builder.kv_index) % 61] * 3)


@dataclass(frozen=True, eq=False)
class OneOfThree:
    """Keys whose number is one more than a multiple of three."""

    roles: ClassVar = {"numbers": "in_place"}
    positions_only: ClassVar = True
    uses_batch_index: ClassVar = False
    numbers: Any

    def lower(self, builder: Any) -> None:
        builder.mask(builder.table(self.numbers, "numbers")[builder.kv_index] % 3 == 1)


@dataclass(frozen=True, eq=False)
class Hashed:
    """Adds one of seven numbers, which a product of a position chooses."""

    roles: ClassVar = {"numbers": "in_place"}
    positions_only: ClassVar = True
    uses_batch_index: ClassVar = False
    numbers: Any

    def lower(self, builder: Any) -> None:
        table = builder.table(self.numbers, "numbers")
        builder.mod(builder.score + table[(builder.q_pos * 5_000_003 + builder.kv_pos) % 7])


@dataclass(frozen=True, eq=False)
class Sloping:
    """Adds a multiple of the distance."""

    roles: ClassVar = {"slopes": "in_place"}
    slopes: Any

    def lower(self, builder: Any) -> None:
        slope = builder.per_head(self.slopes, "slope")
        builder.mod(builder.score + slope * abs(builder.q_pos - builder.kv_pos))


def weights(query: np.ndarray, key: np.ndarray, added: np.ndarray) -> np.ndarray:
    scores = query.astype(float) @ key.astype(float).swapaxes(-1, -2) / query.shape[-1] ** 0.5
    scores = scores + added
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("q_len", [1, 40])
def test_whole_numbers_of_any_size(q_len: int) -> None:
    rng = np.random.default_rng(0)
    for number in (1, 1, 1, 2**40, -(2**40)):
        query, key, value = (normal(rng, 2, n, 8) for n in (q_len, 60, 60))
        numbers = np.zeros(61, np.int64)
        numbers[3] = number
        chosen = numbers[(np.arange(q_len)[:, None] + np.arange(60)) % 61]
        expected = weights(query, key, 3.0 * chosen)
        out, pullback = qkv.vjp(query, key, value, Added(numbers))
        np.testing.assert_allclose(out, expected @ value, atol=2e-6)
        gradient = pullback(np.ones_like(out)).value
        along = expected.sum(-2)[..., None]
        np.testing.assert_allclose(gradient, np.broadcast_to(along, value.shape), atol=3e-5)
        attended = qkv.attention(query, key, value, Added(numbers))
        np.testing.assert_allclose(attended, expected @ value, atol=2e-6)


@pytest.mark.parametrize("q_len", [1, 2, 40])
@pytest.mark.parametrize("grows", [True, False])
def test_whole_numbers_of_which_a_remainder_is_taken(q_len: int, grows: bool) -> None:
    rng = np.random.default_rng(0)
    for call in range(5):
        length = 60 + call * grows
        query, key, value = (normal(rng, 1, 2, n, 8) for n in (q_len, length, length))
        numbers = rng.integers(0, 2 ** (40 if call > 2 else 4), length)
        out = qkv.attention(query, key, value, OneOfThree(numbers), q_offset="end")
        expected = weights(query, key, np.where(numbers % 3 == 1, 0, -np.inf)) @ value
        np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("q_len", [1, 40])
def test_the_index_of_what_a_call_brings(q_len: int) -> None:
    rng = np.random.default_rng(0)
    for call in range(5):
        length = 50 + call if q_len == 1 else 70
        query, key, value = (normal(rng, 1, 2, n, 8) for n in (q_len, length, length))
        numbers = normal(rng, 7)
        out = qkv.attention(query, key, value, Hashed(numbers), q_offset=1000 + call)
        i, j = 1000 + call + np.arange(q_len)[:, None], np.arange(length)
        expected = weights(query, key, numbers[(i * 5_000_003 + j) % 7]) @ value
        np.testing.assert_allclose(out, expected, atol=2e-6)


def test_no_block_is_skipped_by_what_a_table_is_taken_to_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_skipping, "_LEAST_OPERATIONS", 0.0)
    rng = np.random.default_rng(0)
    for _ in range(4):
        query, key, value = normal(rng, 3, 2, 1024, 8)
        out = qkv.attention(query, key, value, Sloping(np.zeros(2, np.float32)))
        expected = weights(query, key, np.zeros(())) @ value
        np.testing.assert_allclose(out, expected, atol=2e-6)
