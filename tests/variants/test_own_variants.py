"""Variants in a user's file are prepared like those of qkv, if they declare how they are read."""

import importlib
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from own_variants import Decay, Near, Undeclared, attention, near

import qkv

pytestmark = pytest.mark.usefixtures("no_prepared_calls")

RATE = np.array([0.0, 0.1, 0.3, 0.9], np.float32)

# How it is made, what it says in words of `attention`, and whether it is declared.
VARIANTS = {
    "dataclass": (lambda: Decay(RATE.copy()), lambda q, k: {"rate": RATE}, True),
    "plain object": (lambda: Near(4), lambda q, k: {"allowed": near(4, q, k)}, True),
    "in |": (
        lambda: qkv.SlidingWindow(1, 0) | Near(4), lambda q, k: {"allowed": near(4, q, k)}, True,
    ),
    "in &": (lambda: qkv.Causal() & Near(4), lambda q, k: {"allowed": near(4, q, k)}, True),
    "in ~": (
        lambda: ~(~qkv.Causal() | Near(4)),
        lambda q, k: {"allowed": near(k, q, k) & ~near(4, q, k)}, True,
    ),
    "undeclared": (lambda: Undeclared(4), lambda q, k: {"allowed": near(4, q, k)}, False),
    "undeclared in &": (
        lambda: qkv.Causal() & Undeclared(4), lambda q, k: {"allowed": near(4, q, k)}, False,
    ),
}  # fmt: skip


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def operands(seed, q_len=20, kv_len=20):
    shapes = (2, 4, q_len, 8), (2, 2, kv_len, 8), (2, 2, kv_len, 8)
    return [normal(*shape, seed=3 * seed + n) for n, shape in enumerate(shapes)]


def expected(words, arrays):
    """Rows that see no key are 0."""
    with np.errstate(invalid="ignore"):
        found = attention(*arrays, **words(arrays[0].shape[-2], arrays[1].shape[-2]))
    return np.nan_to_num(found, nan=0.0)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.sampled("name", list(VARIANTS), one_in=4)
def test_calls(watched, name, layout) -> None:
    make, words, declared = VARIANTS[name]
    for seed in range(4):
        arrays = operands(seed)
        given = [a if layout == "bhld" else a.swapaxes(1, 2).copy() for a in arrays]
        found = qkv.attention(*given, make(), q_offset="end", layout=layout)
        found = found if layout == "bhld" else found.swapaxes(1, 2)
        np.testing.assert_allclose(found, expected(words, arrays), atol=2e-6)
    assert watched.prepared("forward", any_length=False) == declared


@pytest.mark.sampled("name", list(VARIANTS), one_in=4)
def test_decoding_steps_at_new_lengths(watched, name) -> None:
    make, words, declared = VARIANTS[name]
    for length in (17, 18, 19, 40, 18):
        arrays = operands(length, 1, length)
        found = qkv.attention(*arrays, make(), q_offset="end")
        np.testing.assert_allclose(found, expected(words, arrays), atol=2e-6)
    assert watched.prepared("forward", any_length=True) == declared
    assert not watched.prepared("forward", any_length=False)


@pytest.mark.sampled("name", list(VARIANTS), one_in=4)
@pytest.mark.one_in(2)
def test_gradients(watched, name) -> None:
    """Gradients agree with differences of the definition in one direction."""
    make, words, declared = VARIANTS[name]
    for seed in range(4):
        arrays = [a.astype(np.float64) for a in operands(seed)]
        grad_out, along = normal(2, 4, 20, 8, seed=50).astype(float), operands(9)
        _, pullback = qkv.vjp(*arrays, make(), q_offset="end")
        found = pullback(grad_out)
        pairs = zip((found.query, found.key, found.value), along, strict=True)
        ours = sum(np.sum(gradient * step) for gradient, step in pairs)
        above, below = (
            np.sum(
                grad_out * expected(words, [a + h * d for a, d in zip(arrays, along, strict=True)])
            )
            for h in (1e-5, -1e-5)
        )
        np.testing.assert_allclose(ours, (above - below) / 2e-5, rtol=1e-6, atol=1e-6)
    assert watched.prepared("gradients") == declared
    assert watched.prepared("residuals") == declared


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.sampled("name", list(VARIANTS), one_in=4)
def test_tensors(watched, name, layout) -> None:
    make, words, declared = VARIANTS[name]
    for seed in range(4):
        arrays = operands(seed)
        given = [torch.from_numpy(a) for a in arrays]
        if layout == "blhd":
            given = [t.transpose(1, 2).contiguous() for t in given]
        found = qkv.attention(*given, make(), q_offset="end", layout=layout)
        found = found if layout == "bhld" else found.transpose(1, 2)
        np.testing.assert_allclose(found.numpy(), expected(words, arrays), atol=2e-6)
    assert watched.prepared("forward", any_length=False) == declared


def test_other_values_are_other_calls() -> None:
    arrays = operands(0)
    rate = RATE.copy()
    variant = Decay(rate)
    for factor in (1, 1, 1, 2, 2, 0, 1):
        rate[:] = RATE * factor
        found = qkv.attention(*arrays, variant, q_offset="end")
        np.testing.assert_allclose(found, attention(*arrays, rate=rate), atol=2e-6)


class InSlots:
    """A plain object whose attributes are in slots."""

    __slots__ = ("reach",)

    roles: ClassVar = {"reach": "static"}

    def __init__(self, reach):
        self.reach = reach

    lower = Near.lower


def test_attributes_in_slots(watched) -> None:
    for reach in (4, 4, 4, 2):
        arrays = operands(reach)
        found = qkv.attention(*arrays, InSlots(reach))
        np.testing.assert_allclose(
            found, attention(*arrays, allowed=near(reach, 20, 20)), atol=2e-6
        )
    assert watched.prepared("forward", any_length=False)


@dataclass
class WithoutField:
    """Makes an attribute of its field that is no field."""

    rate: Any

    roles: ClassVar = {}

    def __post_init__(self):
        self.doubled = 2 * self.rate

    def lower(self, builder):
        builder.mod(builder.score * self.doubled)


def test_attributes_beside_the_fields_of_a_dataclass_are_named() -> None:
    with pytest.raises(
        qkv.ArgumentError, match="reads doubled, which is no field of the dataclass"
    ):
        qkv.attention(*operands(0), WithoutField(0.5))


@dataclass
class Holds:
    """`Decay` of an array that lies in another object, which says nothing of what it holds."""

    held: Any

    roles: ClassVar = {}

    def lower(self, builder):
        Decay(self.held["rate"]).lower(builder)


class UndeclaredDecay:
    """`Decay`, which declares nothing."""

    def __init__(self, rate):
        self.rate = rate

    lower = Decay.lower


@pytest.mark.parametrize("make", [UndeclaredDecay, lambda rate: Holds({"rate": rate})])
@pytest.mark.parametrize("call", ["called", "of a query that is learned", "compiled"])
def test_gradients_of_what_a_class_does_not_declare_are_refused(make, call) -> None:
    query, key, value = map(torch.from_numpy, operands(0))
    variant = make(torch.tensor(RATE, requires_grad=True))
    attend = qkv.attention
    if call == "compiled":
        attend = torch.compile(lambda *given: qkv.attention(*given, variant), backend="eager")
    elif call == "of a query that is learned":
        query.requires_grad_()
    given = () if call == "compiled" else (variant,)
    with pytest.raises(qkv.UnsupportedError, match="so that its gradient would be lost"):
        attend(query, key, value, *given)
    with torch.no_grad():
        found = attend(query, key, value, *given)
    expected = attention(*operands(0), rate=RATE)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


def test_a_class_whose_module_is_loaded_again(tmp_path, monkeypatch) -> None:
    """Text that compiled code holds names a class by its module; a later class is another one."""
    source = """class Own:
    roles = {}

    def lower(self, builder):
        builder.mod(builder.score - %s * abs(builder.q_pos - builder.kv_pos))
"""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    arrays = operands(0)
    for rate in (0.1, 0.9):
        (tmp_path / "loaded_again.py").write_text(source % rate)
        loaded = sys.modules.get("loaded_again")
        module = importlib.reload(loaded) if loaded else importlib.import_module("loaded_again")
        variant = module.Own()
        compiled = torch.compile(lambda *given: qkv.attention(*given, variant), backend="eager")  # noqa: B023
        found = compiled(*map(torch.from_numpy, arrays))
        np.testing.assert_allclose(found, attention(*arrays, rate=np.full(4, rate)), atol=2e-6)
    del sys.modules["loaded_again"]
