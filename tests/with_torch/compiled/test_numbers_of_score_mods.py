"""Numbers that a score mod reads, and that change between calls of one compiled function.

The mod was made before; the right results are the formula written out for the number of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import qkv

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

GENERATOR = torch.Generator().manual_seed(0)
QUERY = torch.randn(2, 2, 9, 8, generator=GENERATOR, dtype=torch.float64)
NUMBERS = (1.0, 2.0, 3.0, 4.0, 1.0)


class Holder:
    of_class = 1.0

    def __init__(self) -> None:
        self.number: float = 1.0

    def mod(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * self.number

    def __call__(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return np.where(i >= 0, s * self.number, s)


HOLDER, LIST, DICT = Holder(), [1.0], {"number": 1.0}
TABLE = np.ones(9)
GLOBAL: Any = 1.0
NUMPY_NUMBER: Any = np.float64(1.0)


def helper(s: Any) -> Any:
    return np.where(s > 0, s * GLOBAL, s * GLOBAL)


def set_global(number: float) -> None:
    global GLOBAL
    GLOBAL = number


def set_numpy_number(number: float) -> None:
    global NUMPY_NUMBER
    NUMPY_NUMBER = np.float64(number)


def with_default(s: Any, b: Any, h: Any, i: Any, j: Any, number: float = 1.0) -> Any:
    return s * np.where(j >= 0, number, 0.0)


def of_closure() -> tuple[Callable[..., Any], Callable[[float], None]]:
    number = 1.0

    def change(new: float) -> None:
        nonlocal number
        number = new

    return lambda s, b, h, i, j: np.where(i >= 0, s, 0.0) * number, change


CLOSURE, set_closure = of_closure()
PAIR, NAME, REPLACED = (0.0, 1.0), "one", np.cosh


def set_pair(number: float) -> None:
    global PAIR
    PAIR = (0.0, number)


def set_name(number: float) -> None:
    global NAME
    NAME = {1.0: "one", 2.0: "two", 3.0: "three", 4.0: "four"}[number]


def set_function(number: float) -> None:
    global REPLACED
    REPLACED = lambda x: x * 0 + number  # noqa: E731 - what it holds is looked at


CASES: dict[str, tuple[Callable[..., Any], Callable[[float], Any]]] = {
    "global": (lambda s, b, h, i, j: s * GLOBAL, set_global),
    "global with NumPy": (lambda s, b, h, i, j: np.where(i >= 0, s * GLOBAL, 0.0), set_global),
    "closure with NumPy": (CLOSURE, set_closure),
    "default": (with_default, lambda n: setattr(with_default, "__defaults__", (n,))),
    "helper": (lambda s, b, h, i, j: helper(s), set_global),
    "partial": (partial(lambda n, s, b, h, i, j: n * s * GLOBAL, 1.0), set_global),
    "attribute": (
        lambda s, b, h, i, j: s * HOLDER.number,
        lambda n: setattr(HOLDER, "number", n),
    ),
    "attribute, integer": (
        lambda s, b, h, i, j: s * HOLDER.number,
        lambda n: setattr(HOLDER, "number", int(n)),
    ),
    "attribute with NumPy": (
        lambda s, b, h, i, j: np.where(i >= 0, s, 0.0) * HOLDER.number,
        lambda n: setattr(HOLDER, "number", n),
    ),
    "class attribute": (
        lambda s, b, h, i, j: s * Holder.of_class,
        lambda n: setattr(Holder, "of_class", n),
    ),
    "method": (HOLDER.mod, lambda n: setattr(HOLDER, "number", n)),
    "called object": (HOLDER, lambda n: setattr(HOLDER, "number", n)),
    "entry of a list": (lambda s, b, h, i, j: s * LIST[0], lambda n: LIST.__setitem__(0, n)),
    "entry of a dict": (
        lambda s, b, h, i, j: s * DICT["number"],
        lambda n: DICT.__setitem__("number", n),
    ),
    "tuple": (lambda s, b, h, i, j: np.where(i >= 0, s, 0.0) * PAIR[1], set_pair),
    "text": (
        lambda s, b, h, i, j: (
            np.where(i >= 0, s, 0.0) * ["one", "two", "three", "four"].index(NAME) + s
        ),
        set_name,
    ),
    "function": (lambda s, b, h, i, j: np.where(i >= 0, s, 0.0) * REPLACED(s), set_function),
    "number of NumPy": (lambda s, b, h, i, j: s * NUMPY_NUMBER, set_numpy_number),
    "array": (lambda s, b, h, i, j: s * TABLE[j % 9], lambda n: TABLE.__setitem__(slice(None), n)),
    "beside an array": (lambda s, b, h, i, j: s * abs(TABLE[j % 9]) ** 0 * GLOBAL, set_global),
}


def written_out(query: torch.Tensor, number: float) -> torch.Tensor:
    return (query @ query.mT * 8**-0.5 * number).softmax(-1) @ query


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(2)
def test_a_number_that_has_changed_is_seen(name: str, fullgraph: bool) -> None:
    function, change = CASES[name]
    TABLE[:] = 1.0
    change(1.0)
    mod = qkv.ScoreMod(function)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q: qkv.attention(q, q, q, mod), backend="eager", fullgraph=fullgraph
    )
    # The first call of a process leads to a second graph, which is right by chance.
    compiled(QUERY)
    for number in NUMBERS:
        change(number)
        assert_close(compiled(QUERY), written_out(QUERY, number), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_gradients_are_those_of_the_forward_pass() -> None:
    """A number that changes after it, and before the backward pass, belongs to the next call."""
    set_global(1.0)
    mod = qkv.ScoreMod(lambda s, b, h, i, j: np.where(i >= 0, s * GLOBAL, 0.0))
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q: qkv.attention(q, q, q, mod), backend="aot_eager", fullgraph=True
    )
    for number in NUMBERS[:3]:
        set_global(number)
        found = []
        for function in (compiled, lambda q, n=number: written_out(q, n)):
            query = QUERY.clone().requires_grad_()
            out = function(query).square().sum()
            set_global(7.0)
            found.append(torch.autograd.grad(out, query)[0])
            set_global(number)
        assert_close(*found)


def test_a_mod_that_is_replaced_is_seen() -> None:
    torch.compiler.reset()
    made = {"mod": qkv.ScoreMod(lambda s, b, h, i, j: s)}
    compiled = torch.compile(
        lambda q: qkv.attention(q, q, q, made["mod"]), backend="eager", fullgraph=True
    )
    compiled(QUERY)
    assert_close(compiled(QUERY), written_out(QUERY, 1.0))
    made["mod"] = qkv.ScoreMod(lambda s, b, h, i, j: 2.0 * s)
    assert_close(compiled(QUERY), written_out(QUERY, 2.0))
