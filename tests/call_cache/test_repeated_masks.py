"""Masks that are functions are checked once, as score mods are, and what they read is watched."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import qkv

pytestmark = pytest.mark.usefixtures("no_prepared_calls")

QUERY, KEY, VALUE = np.random.default_rng(0).normal(size=(3, 1, 2, 24, 8)).astype(np.float32)
STEP = QUERY[:, :, -1:]


def right(query: Any, allowed: Any, length: int = 24) -> Any:
    scores = np.where(allowed, query @ KEY[:, :, :length].swapaxes(-1, -2) / np.sqrt(8), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ VALUE[:, :, :length]


def test_a_decoding_step_is_prepared_for_all_lengths(watched) -> None:
    mask = qkv.Mask(lambda b, h, i, j: (i - j < 7) | (j < 2 + h))
    heads = np.arange(2)[:, None, None]
    for length in range(12, 24):
        rows = KEY[:, :, :length], VALUE[:, :, :length]
        found = qkv.attention(STEP, *rows, mask, q_offset="end")
        keys = np.arange(length)
        allowed = (length - 1 - keys < 7) | (keys < 2 + heads)
        np.testing.assert_allclose(found, right(STEP, allowed, length), atol=1e-6)
    assert watched.prepared("forward", any_length=True) == 1
    assert watched.computed <= 2


@pytest.mark.parametrize("arrays", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_what_a_mask_captures_is_watched(watched, arrays: Any) -> None:
    document, limit = np.arange(24) // 5, 3
    captured = arrays(document)
    keys = np.arange(24)
    mask = qkv.Mask(lambda b, h, i, j: (captured[i] == captured[j]) | (j < limit))
    operands = [arrays(array) for array in (QUERY, KEY, VALUE)]
    for change in range(4):
        allowed = (document[:, None] == document) | (keys < limit)
        for _ in range(3):
            computed = watched.computed
            found = qkv.attention(*operands, mask)
            np.testing.assert_allclose(np.asarray(found), right(QUERY, allowed), atol=1e-6)
        assert watched.computed == computed, "the third call of a kind is prepared"
        limit += 4 * (change == 1)
        document[:8] += change == 0
        if change == 2:
            document = document[::-1].copy()
            captured = arrays(document)


def test_attributes_that_change_are_seen() -> None:
    class Window:
        size = 3

        def __call__(self, b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (i - j < self.size)

    window = Window()
    rows, keys = np.indices((24, 24))
    for size in (3, 3, 3, 5, 5, 2):
        window.size = size
        found = qkv.attention(QUERY, KEY, VALUE, qkv.Mask(window))
        allowed = (rows >= keys) & (rows - keys < size)
        np.testing.assert_allclose(found, right(QUERY, allowed), atol=1e-6)


class Factor(int):
    """A number with an attribute."""


class First(NamedTuple):
    low: float
    high: float


class Second(NamedTuple):
    high: float
    low: float


def helper(score: Any) -> Any:
    return score * helper.factor


@functools.wraps(np.where)
def where(*arguments: Any) -> Any:
    return np.where(*arguments) * FACTOR


FACTOR, TABLE, NUMBER = 1.0, {"factor": 1.0}, Factor(1)
PAIR: Any = First(0.0, 0.0)


def of_a_bound_method() -> Any:
    get = TABLE.get
    return lambda s, b, h, i, j: s * get("factor")


def of_an_import(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    from numbers_of_a_module import imported

    return s * imported


CHANGING: dict[str, Callable[[], Any]] = {
    "a bound method": of_a_bound_method,
    "its object": lambda: lambda s, b, h, i, j: s * TABLE["factor"],
    "a function with the name of another": lambda: lambda s, b, h, i, j: where(i >= -1, s, 0.0),
    "an attribute of a function": lambda: lambda s, b, h, i, j: helper(s),
    "an attribute of a number": lambda: lambda s, b, h, i, j: s * NUMBER.factor,
    "names of a tuple": lambda: lambda s, b, h, i, j: s * PAIR.low,
    "what it imports": lambda: of_an_import,
    "a global by name": lambda: lambda s, b, h, i, j: s * globals()["FACTOR"],
}


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", CHANGING)
def test_what_a_function_captures_and_may_change_is_watched(
    name: str, library: Any, monkeypatch: Any
) -> None:
    operands = [library(array) for array in (QUERY, KEY, VALUE)]
    for factor in (2.0, 5.0):
        monkeypatch.setitem(TABLE, "factor", factor)
        monkeypatch.setattr(helper, "factor", factor, raising=False)
        monkeypatch.setattr(NUMBER, "factor", factor, raising=False)
        monkeypatch.setitem(globals(), "FACTOR", factor)
        monkeypatch.setitem(sys.modules, "numbers_of_a_module", SimpleNamespace(imported=factor))
        monkeypatch.setitem(globals(), "PAIR", (First if factor == 2 else Second)(2.0, 5.0))
        for _ in range(4):
            found = np.asarray(qkv.attention(*operands, qkv.ScoreMod(CHANGING[name]())))
            np.testing.assert_allclose(found, right(factor * QUERY, True), atol=1e-6)


def test_methods_of_captured_tensors_are_theirs(watched) -> None:
    lengths = torch.tensor([4, 9])
    mask = qkv.Mask(lambda b, h, i, j: (j < lengths.float().mul(2.0)[h]) | (j == lengths.size(0)))
    operands = [torch.from_numpy(array) for array in (QUERY, KEY, VALUE)]
    for _ in range(4):
        found = qkv.attention(*operands, mask)
        allowed = np.arange(24) < 2 * lengths.numpy()[:, None, None]
        np.testing.assert_allclose(found.numpy(), right(QUERY, allowed), atol=1e-6)
        computed, watched.computed = watched.computed, 0
    assert computed == 0
    lengths += 1
    found = qkv.attention(*operands, mask)
    allowed = np.arange(24) < 2 * lengths.numpy()[:, None, None]
    np.testing.assert_allclose(found.numpy(), right(QUERY, allowed), atol=1e-6)


def test_joined_masks_of_functions_are_prepared() -> None:
    mask = qkv.Causal("end") & ~qkv.Mask(lambda b, h, i, j: j % 3 == 0)
    step = qkv.prepare(STEP, KEY, VALUE, mask, free=("kv_len",))
    for length in (24, 11):
        found = step(STEP, KEY[:, :, :length], VALUE[:, :, :length])
        allowed = np.arange(length) % 3 != 0
        np.testing.assert_allclose(found, right(STEP, allowed, length), atol=1e-6)
