"""Score mods that nobody has written, drawn from the language of expressions.

A tree of names and numbers says what is computed; `evaluate` computes it, on symbols or numbers
alike. Every mod is well conditioned: it is continuous in the score and changes it by a few units at
most, so that an error beyond the bound is one of the kernel and not one of the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qkv.variants import ScoreMod

Array = NDArray[Any]
Tree: TypeAlias = tuple[Any, ...]
Draw: TypeAlias = Callable[[np.random.Generator, int], Tree]

CONSTANTS = 8
"""Numbers that a mod reads from an array of its own, between 1/4 and 1."""

OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "mod": lambda a, b: a % b,
    "floordiv": lambda a, b: a // b,
    "neg": lambda a: -a,
    "abs": abs,
    "min": np.minimum,
    "max": np.maximum,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "floor": np.floor,
    "clip": np.clip,
    "where": np.where,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "not": np.logical_not,
}


def random_mod(
    rng: np.random.Generator, forbids: bool = False
) -> Callable[[np.random.Generator], ScoreMod]:
    """A tree, and what makes a score mod of it with new numbers."""
    tree = _score(rng, int(rng.integers(1, 3)))
    if forbids:
        tree = ("where", _condition(rng), tree, -np.inf)

    def make(values: np.random.Generator) -> ScoreMod:
        return ScoreMod(partial(evaluate, tree, values.uniform(0.25, 1.0, CONSTANTS)))

    return make


def evaluate(tree: Any, constants: Any, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """The value of a tree at `(score, batch, head, q_pos, kv_pos)`.

    Given scores of float32, every step is rounded to float32.
    """
    if not isinstance(tree, tuple):
        return tree
    name, *parts = tree
    if name == "place":
        return {"score": score, "b": b, "h": h, "q": q, "k": k}[parts[0]]
    values = [evaluate(part, constants, score, b, h, q, k) for part in parts]
    found = constants[values[0]] if name == "constant" else OPERATIONS[name](*values)
    return _rounded(found, score) if isinstance(score, np.ndarray) else found


def _rounded(found: Any, score: Array) -> Any:
    """Integers and conditions stay as they are."""
    array = np.asarray(found)
    return array.astype(score.dtype) if array.dtype.kind == "f" else found


SCORE: Tree = ("place", "score")
DISTANCE: Tree = ("sub", ("place", "q"), ("place", "k"))


def _score(rng: np.random.Generator, depth: int) -> Tree:
    """A new score: a continuous function of the one before."""
    if depth == 0:
        return SCORE
    inner, c = _score(rng, depth - 1), _constant(rng)
    makers: tuple[Callable[[], Tree], ...] = (
        lambda: ("add", inner, _term(rng)),
        lambda: ("sub", inner, _term(rng)),
        lambda: ("mul", inner, c),
        lambda: ("mul", inner, ("add", c, _share(rng))),
        lambda: ("div", inner, ("add", 1.0, _share(rng))),
        lambda: ("mul", c, ("tanh", ("div", inner, c))),
        lambda: ("min", inner, ("add", c, 1.0)),
        lambda: ("max", inner, ("neg", c)),
        lambda: ("where", ("lt", inner, c), inner, c),
        lambda: ("abs", inner),
        lambda: ("neg", inner),
        lambda: ("exp", ("neg", ("abs", inner))),
        lambda: ("log", ("add", ("abs", inner), c)),
        lambda: ("sqrt", ("add", ("abs", inner), c)),
        lambda: ("where", _condition(rng), inner, ("mul", inner, c)),
        lambda: ("where", _condition(rng), inner, ("sub", inner, c)),
    )
    return makers[int(rng.integers(len(makers)))]()


def _constant(rng: np.random.Generator) -> Tree:
    return ("constant", int(rng.integers(CONSTANTS)))


def _term(rng: np.random.Generator) -> Tree:
    """Something of the places alone, between 0 and some units."""
    distance: Tree = ("abs", DISTANCE)
    makers: tuple[Callable[[], Tree], ...] = (
        lambda: ("mul", _constant(rng), _share(rng)),
        lambda: ("mul", 0.02, ("mul", _constant(rng), distance)),
        lambda: ("mul", 0.1, ("sqrt", distance)),
        lambda: ("log", ("add", distance, 1)),
        lambda: ("where", _condition(rng), _constant(rng), _share(rng)),
        lambda: ("mul", 0.01, ("floor", ("div", distance, 3))),
    )
    return makers[int(rng.integers(len(makers)))]()


def _share(rng: np.random.Generator) -> Tree:
    """Something of the places alone, between 0 and 1."""
    n = int(rng.integers(2, 8))
    makers: tuple[Callable[[], Tree], ...] = (
        lambda: _constant(rng),
        lambda: ("div", ("mod", _whole(rng), n), n),
        lambda: ("tanh", ("mul", 0.1, ("abs", _whole(rng)))),
        lambda: ("exp", ("mul", -0.1, ("abs", DISTANCE))),
        lambda: ("constant", ("clip", _whole(rng), 0, CONSTANTS - 1)),
        lambda: ("constant", ("mod", _whole(rng), CONSTANTS)),
        lambda: ("max", ("min", ("mul", 0.1, _whole(rng)), 1.0), 0.0),
    )
    return makers[int(rng.integers(len(makers)))]()


def _whole(rng: np.random.Generator) -> Tree:
    """An integer of the places."""
    n = int(rng.integers(2, 8))
    makers: tuple[Callable[[], Tree], ...] = (
        lambda: DISTANCE,
        lambda: ("place", ("q", "k", "h", "b")[int(rng.integers(4))]),
        lambda: ("floordiv", DISTANCE, n),
        lambda: ("add", ("mul", ("place", "q"), 2), ("sub", ("place", "k"), ("place", "h"))),
        lambda: ("neg", ("mod", ("place", "k"), n)),
        lambda: ("max", ("place", "q"), ("min", ("place", "k"), n)),
        lambda: ("where", _condition(rng), ("place", "k"), ("place", "h")),
    )
    return makers[int(rng.integers(len(makers)))]()


def _condition(rng: np.random.Generator) -> Tree:
    n = int(rng.integers(2, 8))
    makers: tuple[Callable[[], Tree], ...] = (
        lambda: ("eq", ("mod", DISTANCE, n), 1),
        lambda: ("ne", ("mod", ("place", "k"), n), ("mod", ("place", "h"), n)),
        lambda: ("lt", ("place", "q"), ("place", "k")),
        lambda: ("le", DISTANCE, n),
        lambda: ("not", ("lt", ("abs", DISTANCE), n)),
        lambda: ("and", _condition(rng), _condition(rng)),
        lambda: ("or", _condition(rng), ("eq", ("place", "q"), n)),
    )
    return makers[int(rng.integers(len(makers)))]()
