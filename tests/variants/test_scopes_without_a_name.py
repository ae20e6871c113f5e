"""Functions and classes that `exec` made in a scope that says of no module that they are its."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from own_variants import attention
from torch.nn.attention.flex_attention import or_masks

import qkv

pytestmark = pytest.mark.usefixtures("no_prepared_calls")

SOURCE = """
def window(b, h, i, j):
    return (i >= j) & (i - j < 4)

def start(b, h, i, j):
    return j < 2

def either(b, h, i, j):
    return window(b, h, i, j) | start(b, h, i, j)

def nearer(score, b, h, i, j):
    return score - slope(h) * abs(i - j)

def slope(h):
    return 0.1 * (h + 1)

class Reach:
    size = 4

class OwnWindow:
    roles = {}
    positions_only = True

    def lower(self, builder):
        behind = builder.q_pos - builder.kv_pos
        builder.mask((behind >= 0) & (behind < 4))

def of_a_class(b, h, i, j):
    return (i >= j) & (i - j < Reach.size)
"""
ROWS, KEYS = np.indices((20, 20))
WINDOW = (ROWS >= KEYS) & (ROWS - KEYS < 4)

CASES = {
    "a mask": (lambda scope: qkv.Mask(scope.window), {"allowed": WINDOW}),
    "calls others": (lambda scope: qkv.Mask(scope.either), {"allowed": WINDOW | (KEYS < 2)}),
    "joined": (
        lambda scope: qkv.Mask(scope.window) | qkv.Mask(scope.start),
        {"allowed": WINDOW | (KEYS < 2)},
    ),
    "of flex_attention": (
        lambda scope: qkv.Mask(or_masks(scope.window, scope.start)),
        {"allowed": WINDOW | (KEYS < 2)},
    ),
    "scores": (
        lambda scope: qkv.ScoreMod(scope.nearer),
        {"rate": 0.1 * np.arange(1, 5)},
    ),
    "a class": (lambda scope: scope.OwnWindow(), {"allowed": WINDOW}),
}  # fmt: skip


def scope() -> SimpleNamespace:
    names: dict[str, object] = {}
    exec(SOURCE, names)
    return SimpleNamespace(**names)


def operands() -> list[np.ndarray]:
    return list(np.random.default_rng(0).normal(size=(3, 2, 4, 20, 8)).astype(np.float32))


@pytest.mark.parametrize("arrays", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_right(case: str, arrays) -> None:
    assert scope().window.__module__ is None
    make, words = CASES[case]
    variant = make(scope())
    for _ in range(3):
        found = qkv.attention(*map(arrays, operands()), variant)
        np.testing.assert_allclose(np.asarray(found), attention(*operands(), **words), atol=2e-6)


@pytest.mark.parametrize("case", ["a class", "of flex_attention"])
def test_compiled_by_torch(case: str) -> None:
    make, words = CASES[case]
    variant = make(scope())
    step = torch.compile(lambda q, k, v: qkv.attention(q, k, v, variant), backend="eager")
    found = step(*map(torch.from_numpy, operands()))
    np.testing.assert_allclose(np.asarray(found), attention(*operands(), **words), atol=2e-6)


def test_attributes_of_their_classes_are_watched() -> None:
    names = scope()
    mask = qkv.Mask(names.of_a_class)
    for size in (4, 4, 4, 2, 7):
        names.Reach.size = size
        found = qkv.attention(*operands(), mask)
        allowed = (ROWS >= KEYS) & (size > ROWS - KEYS)
        np.testing.assert_allclose(found, attention(*operands(), allowed=allowed), atol=2e-6)


class OfNoModule:
    """A class whose module is None, which Python allows."""

    def __call__(self, b, h, i, j):
        return (i >= j) & (i - j < 4)


OfNoModule.__module__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_objects_of_classes_of_no_module(library) -> None:
    x = library(np.random.default_rng(0).normal(size=(1, 2, 20, 8)))
    for place in range(3):
        operands = [OfNoModule() if n == place else x for n in range(3)]
        with pytest.raises(qkv.DTypeError, match="is a OfNoModule, not an array"):
            qkv.attention(*operands)
    with pytest.raises(qkv.ArgumentError, match="is not a variant"):
        qkv.attention(x, x, x, [OfNoModule(), SimpleNamespace()])
    found = qkv.attention(x, x, x, qkv.Mask(OfNoModule()))
    np.testing.assert_array_equal(found, qkv.attention(x, x, x, library(WINDOW)))


@pytest.mark.parametrize("name", [None, 5])
def test_calls_in_a_scope_with_no_word_as_its_name(name) -> None:
    x = np.random.default_rng(0).normal(size=(1, 2, 20, 8))
    scope = {"__name__": name, "qkv": qkv, "x": x, "bias": np.tri(20)}
    with warnings.catch_warnings():  # Python leaves out warnings of a module that is None.
        warnings.simplefilter("ignore", qkv.MaskLooksBooleanWarning)
        exec("out = qkv.attention(x, x, x, bias)", scope)
    np.testing.assert_array_equal(scope["out"], qkv.attention(x, x, x, qkv.Bias(np.tri(20))))
