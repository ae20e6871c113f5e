"""Any function of the score and its place."""

from __future__ import annotations

import builtins
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from qkv.errors import ArgumentError
from qkv.problem.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.problem.symbols import Expr
from qkv.variants.base import Variant


@dataclass(frozen=True, eq=False, repr=False)
class ScoreMod(Variant):
    """`score = fn(score, batch, head, q_pos, kv_pos)`.

    Parameters
    ----------
    fn : callable
        Written with operators and NumPy functions (np.where, np.exp, np.log, np.sqrt, np.tanh,
        np.minimum, np.maximum, np.clip, np.floor, np.abs); it is called once, with symbols.
        `batch` is the flat leading index. Arrays in its closure, defaults or globals may be indexed
        with symbols; they are read at call time. A result of exactly -inf forbids the pair.

    Raises
    ------
    ArgumentError
        If fn branches on a symbol, or uses what the language does not have.
    ShapeError
        If an array index could leave the array; np.clip proves it inside.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> decay = qkv.ScoreMod(lambda s, b, h, q, k: s - 0.1 * abs(q - k))
    >>> x = np.eye(2)
    >>> bool(np.isfinite(qkv.attention(x, x, x, decay)).all())
    True
    """

    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ArgumentError(
                f"ScoreMod takes a function, not {type(self.fn).__name__}.",
                action="Pass fn(score, batch, head, q_pos, kv_pos).",
            )
        try:
            signature = inspect.signature(self.fn)
        except (TypeError, ValueError):
            return  # written in C, perhaps: the call will tell
        try:
            signature.bind(*"sbhqk")
        except TypeError:
            raise ArgumentError(
                f"the score mod takes {signature}, not five arguments.",
                action="Write fn(score, batch, head, q_pos, kv_pos), whichever of them it uses.",
            ) from None

    def __repr__(self) -> str:
        return f"ScoreMod({getattr(self.fn, '__name__', type(self.fn).__name__)})"

    def with_arrays(self, change: Callable[[Any], Any]) -> ScoreMod:
        """The same function, each value from outside it replaced by `change(value)`."""
        return ScoreMod(_with_values(self.fn, change))

    def lower(self, builder: Builder) -> None:
        known: dict[int, Any] = {}

        def symbol(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                if id(value) not in known:
                    table = builder.table(value, "closure array")
                    known[id(value)] = table if value.ndim else table[()]
                return known[id(value)]
            if isinstance(value, np.generic):
                return builder.scalar(value, "closure value")
            return value

        result = _with_values(self.fn, symbol)(
            builder.score, builder.batch, builder.head, builder.q_pos, builder.kv_pos
        )
        if not isinstance(result, Expr | int | float | np.generic):
            raise ArgumentError(
                f"the score mod returned {type(result).__name__}, not a score.",
                action="Return an expression of score, batch, head, q_pos and kv_pos.",
            )
        builder.mod(result)

    def naive(self, dense: Dense) -> None:
        with np.errstate(all="ignore"):
            for i, row in enumerate(dense.scores):
                q_pos = int(dense.q_pos[i])
                row[:] = self.fn(row.copy(), dense.batch, dense.head, q_pos, dense.kv_pos)
        dense.allowed &= ~np.isneginf(dense.scores)

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[ScoreMod]:
        per_head = rng.normal(size=shape.num_heads)
        by_distance = rng.normal(size=16).astype(np.float32)

        def curve(score: Any, batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
            return np.exp(-np.abs(score)) * per_head[head] + 0.1 * (batch + 1)

        def looked_up(score: Any, batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
            near = by_distance[np.clip(q_pos - kv_pos, 0, 15)]
            return np.where((q_pos - kv_pos) % 3 == 1, -np.inf, score + near)

        return (cls(curve), cls(looked_up))


def _with_values(fn: Callable[..., Any], symbol: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function with values replaced: in closure, defaults and the globals that it names."""
    if isinstance(fn, partial):
        return partial(
            _with_values(fn.func, symbol),
            *map(symbol, fn.args),
            **{name: symbol(value) for name, value in fn.keywords.items()},
        )
    if isinstance(fn, types.MethodType):
        return types.MethodType(_with_values(fn.__func__, symbol), fn.__self__)
    if not isinstance(fn, types.FunctionType):
        return fn
    closure = fn.__closure__ and tuple(
        types.CellType(symbol(cell.cell_contents)) for cell in fn.__closure__
    )
    named = _names(fn.__code__)
    scope = {
        name: symbol(value) if name in named else value for name, value in fn.__globals__.items()
    }
    scope.setdefault("__builtins__", builtins)
    defaults = fn.__defaults__ and tuple(map(symbol, fn.__defaults__))
    made = types.FunctionType(fn.__code__, scope, fn.__name__, defaults, closure)
    made.__kwdefaults__ = fn.__kwdefaults__ and {k: symbol(v) for k, v in fn.__kwdefaults__.items()}
    return made


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names(const)
    return names
