"""Elementary functions, written with the operations of `qkv.problem.language.expressions`.

Each is about as exact in the type of computation as NumPy's function is, and so is its derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from qkv.problem.language.expressions import Load, Node, as_node, operation, walk

__all__ = ["build", "cosine", "expm1", "is_whole", "log1p", "logarithm", "sigmoid", "sine",
           "whole_power"]  # fmt: skip

_PI = (
    3.125, 0.01611328125, 0.0004730224609375, 6.318092346191406e-06, 3.166496753692627e-08,
    1.2154201013012384e-10,
)  # fmt: skip
"""Pi in parts whose products with whole numbers below 2^18 are exact in float32, but for the last,
which is small."""
_SINE = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(1, 11))
"""Taylor's coefficients from the third power on; the first that is left out is below 3e-19."""
_LARGEST = 2.0**127
"""Factors of whole powers stay below this, so that float32 holds them."""


def build(name: str, *args: Any) -> Node:
    """`operation` on anything that `as_node` takes."""
    return operation(name, *map(as_node, args))


def sine(x: Any) -> Node:
    """`sin(x)`: of what is left of the nearest multiple of pi, with its sign."""
    turns = build("floor", build("add", build("mul", x, 1 / math.pi), 0.5))
    value = _sine_of_rest(x, turns)
    return build("where", _is_even(turns), value, build("neg", value))


def cosine(x: Any) -> Node:
    """`cos(x)`: of what is left of the nearest odd multiple of pi / 2, with its sign."""
    turns = build("floor", build("mul", x, 1 / math.pi))
    value = _sine_of_rest(x, build("add", turns, 0.5))
    return build("where", _is_even(turns), build("neg", value), value)


def _is_even(turns: Node) -> Node:
    return build("eq", build("mod", turns, 2), 0)


def _sine_of_rest(x: Any, turns: Node) -> Node:
    """`sin(x - turns * pi)` of an argument between -pi / 2 and pi / 2."""
    rest = build("mul", x, 1.0)
    for part in _PI:
        rest = build("sub", rest, build("mul", turns, part))
    square = build("mul", rest, rest)
    series: Any = 0.0
    for coefficient in reversed(_SINE):
        series = build("mul", square, build("add", series, coefficient))
    return build("add", rest, build("mul", rest, series))


def sigmoid(x: Any) -> Node:
    """`1 / (1 + exp(-x))`, whose logarithm is right where it is small.

    The bounds of both exponentials lie beyond where each is taken, since `min` and `max` have
    another derivative where their arguments are equal.
    """
    falling = build("exp", build("neg", build("max", x, -1.0)))
    rising = build("exp", build("min", x, 1.0))
    small = build("div", rising, build("add", rising, 1.0))
    return build("where", build("lt", x, 0), small, build("div", 1.0, build("add", falling, 1.0)))


def log1p(x: Any) -> Node:
    """`log(1 + x)`, with what rounding takes from a small x when 1 is added."""
    above = build("add", x, 1.0)
    whole = build("log", above)
    lost = build("div", build("sub", build("sub", above, 1.0), x), above)
    is_small = build("lt", build("abs", x), 1.0)
    return build("where", is_small, build("sub", whole, lost), whole)


def expm1(x: Any) -> Node:
    """`exp(x) - 1`; of a small x by `2 t / (1 - t)` with `t = tanh(x / 2)`."""
    half = build("tanh", build("mul", 0.5, x))
    small = build("div", build("mul", 2.0, half), build("sub", 1.0, half))
    is_small = build("lt", build("abs", x), 1.0)
    return build("where", is_small, small, build("sub", build("exp", x), 1.0))


def logarithm(base: int) -> Callable[[Any], Node]:
    """The logarithm to a whole base: of positions, a whole number for each power of the base.

    Of scores and entries of floating tables it is differentiable, and may be rounded.
    """

    def log(x: Any) -> Node:
        node = as_node(x)
        value = build("mul", build("log", node), 1 / math.log(base))
        if "score" in node.variables or any(
            isinstance(part, Load) and part.kind == "float" for part in walk(node)
        ):
            return value
        nearest = build("floor", build("add", value, 0.5))
        is_power = build("eq", node, whole_power(base, nearest))
        return build("where", is_power, build("mul", nearest, 1.0), value)

    return log


def is_whole(base: float) -> bool:
    """Whether a positive number other than 1, or its reciprocal, is a whole number."""
    if base == 1 or base < 1 / _LARGEST:
        return False
    whole = base if base > 1 else 1 / base
    return whole == int(whole)


def whole_power(base: float, exponent: Any) -> Node:
    """`base ** exponent` for which `is_whole` holds and an exponent of integers.

    Factors `base ** (2 ** k)` are multiplied, so that it is exact where the type of computation
    holds it.
    """
    node = as_node(exponent)
    if base < 1:
        return whole_power(round(1 / base), build("neg", node))
    size = build("abs", node)
    product, factor, count = as_node(1.0), float(base), 0
    while factor < _LARGEST:
        is_factor = build("eq", build("mod", build("floordiv", size, 2**count), 2), 1)
        product = build("mul", product, build("where", is_factor, factor, 1.0))
        factor, count = factor * factor, count + 1
    power = build("where", build("lt", node, 0), build("div", 1.0, product), product)
    beyond = build("exp", build("mul", node, math.log(base)))
    return build("where", build("lt", size, 2**count), power, beyond)
