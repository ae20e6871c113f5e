"""Score mods that nobody has written, drawn from the language of expressions.

A tree of names and numbers says what is computed: `evaluate` computes it, `derivative` how it
changes with the score, and `as_function` writes it down as a user would. Every mod is well
conditioned: it is continuous in the score and changes it by a few units at most, so that an error
beyond the bound is one of the kernel and not one of the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

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


def random_tree(rng: np.random.Generator, forbids: bool = False) -> Tree:
    """A score mod; with `forbids`, one that gives some pairs a score of -inf."""
    tree = _score(rng, int(rng.integers(1, 3)))
    return ("where", _condition(rng), tree, -np.inf) if forbids else tree


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


def derivative(
    tree: Any, constants: Any, score: Any, b: Any, h: Any, q: Any, k: Any
) -> tuple[Any, Any]:
    """The value of a tree, and its derivative by the score; 0.0 where no score is in it.

    Given scores of float32, every step of both is rounded to float32, so that `1 - tanh(x) ** 2`
    cancels as it does for whoever computes in that type.
    """
    if not isinstance(tree, tuple):
        return tree, 0.0
    name, *parts = tree
    if name == "place":
        return {"score": score, "b": b, "h": h, "q": q, "k": k}[parts[0]], float(
            parts[0] == "score"
        )
    if name == "constant":
        index, _ = derivative(parts[0], constants, score, b, h, q, k)
        return _rounded(constants[index], score), 0.0
    found = [derivative(part, constants, score, b, h, q, k) for part in parts]
    values, slopes = [v for v, _ in found], [d for _, d in found]
    value = _rounded(OPERATIONS[name](*values), score)
    if all(isinstance(d, float) and d == 0.0 for d in slopes):
        return value, 0.0
    return value, _rounded(DERIVATIVES[name](value, values, slopes), score)


DERIVATIVES: Mapping[str, Callable[..., Any]] = {
    "add": lambda y, v, d: d[0] + d[1],
    "sub": lambda y, v, d: d[0] - d[1],
    "mul": lambda y, v, d: d[0] * v[1] + v[0] * d[1],
    "div": lambda y, v, d: (d[0] - y * d[1]) / v[1],
    "neg": lambda y, v, d: -d[0],
    "abs": lambda y, v, d: np.sign(v[0]) * d[0],
    "min": lambda y, v, d: np.where(v[0] == v[1], (d[0] + d[1]) / 2, np.where(v[0] < v[1], *d)),
    "max": lambda y, v, d: np.where(v[0] == v[1], (d[0] + d[1]) / 2, np.where(v[0] > v[1], *d)),
    "exp": lambda y, v, d: y * d[0],
    "log": lambda y, v, d: d[0] / v[0],
    "sqrt": lambda y, v, d: d[0] / (2 * y),
    "tanh": lambda y, v, d: (1 - y * y) * d[0],
    "where": lambda y, v, d: np.where(v[0], d[1], d[2]),
    "lt": lambda y, v, d: 0.0,
}
"""The derivatives of operations on scores, from the value, the parts and the parts' derivatives."""


def as_function(tree: Tree, constants: Array) -> Callable[..., Any]:
    """`lambda score, batch, head, q_pos, kv_pos: ...`, which closes over the constants."""
    return _maker(tree)(constants)


@lru_cache(maxsize=256)
def _maker(tree: Tree) -> Callable[[Array], Callable[..., Any]]:
    scope = {"np": np}
    source = f"lambda constants: lambda score, b, h, q, k: {written(tree)}"
    return eval(source, scope)  # type: ignore[no-any-return]


def written(tree: Any) -> str:
    """A tree as Python."""
    if not isinstance(tree, tuple):
        return "-np.inf" if tree == -np.inf else repr(tree)
    name, *parts = tree
    if name == "place":
        return str(parts[0])
    if name == "constant":
        return f"constants[{written(parts[0])}]"
    values = list(map(written, parts))
    if name in SIGNS:
        return f"({f' {SIGNS[name]} '.join(values)})"
    return f"{NAMES.get(name, 'np.' + name)}({', '.join(values)})"


SIGNS: Mapping[str, str] = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "mod": "%", "floordiv": "//", "lt": "<",
    "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|",
}  # fmt: skip
NAMES: Mapping[str, str] = {
    "neg": "-", "abs": "abs", "min": "np.minimum", "max": "np.maximum", "not": "~",
}  # fmt: skip


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
