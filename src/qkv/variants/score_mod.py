"""Score mods: any function of the score, batch, head and positions."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from qkv._dynamo import is_reading
from qkv.errors import ArgumentError
from qkv.problem.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.problem.expressions import Var, as_node, text
from qkv.problem.reading import (
    Reading,
    explained,
    global_names,
    in_words,
    kind_of_table,
    signature_unless,
    with_replaced_values,
)
from qkv.problem.symbols import Expr, Table
from qkv.readable_checks import array_shape
from qkv.variants.base import Expression, FunctionText, Opaque, ReadFunction, Variant


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

    positions_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ArgumentError(
                f"ScoreMod takes a function, not {type(self.fn).__name__}.",
                action="Pass fn(score, batch, head, q_pos, kv_pos).",
            )
        if is_reading():
            return  # The call checks it.
        signature = signature_unless(self.fn, 5)
        if signature is not None:
            is_mask = signature_unless(self.fn, 4) is None
            raise ArgumentError(
                f"the score mod takes {signature}, not five arguments.",
                action="Pass qkv.Mask(fn) if fn(batch, head, q_pos, kv_pos) says which pairs may "
                "attend; a score mod is fn(score, batch, head, q_pos, kv_pos)."
                if is_mask
                else "Write fn(score, batch, head, q_pos, kv_pos), whichever of them it uses.",
            )

    def __repr__(self) -> str:
        return f"ScoreMod({getattr(self.fn, '__name__', type(self.fn).__name__)})"

    def tree_flatten(self) -> tuple[Opaque, list[Any]]:
        """The function without its arrays, and these arrays.

        A function that reads attributes of objects is read now, since these may change.
        """
        arrays: list[Any] = []
        constants = _captured_values(self.fn, arrays)
        if constants is not None or not _is_plain(self.fn):
            return _Function(self.fn, constants), arrays
        reading = Reading(with_replaced_values)
        with explained(self.fn):
            result = reading.read(self.fn, *[Expr(Var(name)) for name in _ARGUMENTS])
        _check_result(result)
        return Expression(as_node(result)), reading.arrays

    @classmethod
    def tree_unflatten(cls, function: Opaque, arrays: Sequence[Any]) -> ScoreMod:
        """The score mod whose function reads these arrays."""
        if isinstance(function, Expression):
            return _Expressed(function, tuple(arrays))
        if isinstance(function, _Function):
            function.check_constants()
        following = iter(arrays)
        made = object.__new__(cls)
        fn = with_replaced_values(function.thing, lambda v: next(following) if _is_array(v) else v)
        object.__setattr__(made, "fn", fn)
        return made

    def with_functions(self, read: ReadFunction) -> Any:
        """See `qkv.variants.base.ReadFunction`."""
        found = read(self.fn, _ARGUMENTS)
        return None if found is None else FunctionText(*found, is_mask=False)

    def lower(self, builder: Builder) -> None:
        tables: dict[int, Any] = {}

        def symbol(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                if id(value) not in tables:
                    table = builder.table(value, "closure array")
                    tables[id(value)] = table if value.ndim else table[()]
                return tables[id(value)]
            if isinstance(value, np.generic):
                return builder.scalar(value, "closure value")
            return value

        with explained(self.fn):
            result = with_replaced_values(self.fn, symbol)(
                builder.score, builder.batch, builder.head, builder.q_pos, builder.kv_pos
            )
        _check_result(result)
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
            # Smooth, since rounding would choose the side of a bend, and so the derivative.
            return np.exp(-0.5 * score * score) * per_head[head] + 0.1 * (batch + 1)

        def from_table(score: Any, batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
            near = by_distance[np.clip(q_pos - kv_pos, 0, 15)]
            return np.where((q_pos - kv_pos) % 3 == 1, -np.inf, score + near)

        return (cls(curve), cls(from_table))


_ARGUMENTS = ("score", "batch", "head", "q_pos", "kv_pos")


def _check_result(result: Any) -> None:
    if not isinstance(result, Expr | int | float | np.generic):
        raise ArgumentError(
            f"the score mod returned {type(result).__name__}, not a score.",
            action="Return an expression of score, batch, head, q_pos and kv_pos.",
        )


class _Expressed(ScoreMod):
    """A score mod as an expression and its arrays."""

    expression: Expression
    arrays: tuple[Any, ...]

    def __init__(self, expression: Expression, arrays: tuple[Any, ...]) -> None:
        object.__setattr__(self, "expression", expression)
        object.__setattr__(self, "arrays", arrays)

    def __repr__(self) -> str:
        return f"ScoreMod({text(self.expression.thing)})"

    def tree_flatten(self) -> tuple[Opaque, list[Any]]:
        return self.expression, list(self.arrays)

    def lower(self, builder: Builder) -> None:
        builder.mod(self.expression.on_tables(builder, self.arrays))


class _Function(Opaque):
    """A function as part of a call's structure: equal to one of the same code and constants."""

    __slots__ = ("constants",)

    def __init__(self, fn: Callable[..., Any], constants: tuple[Any, ...] | None) -> None:
        super().__init__(fn, known=constants is not None)
        self.constants = constants

    def __eq__(self, other: object) -> bool:
        if self.constants is None or not isinstance(other, _Function):
            return super().__eq__(other)
        return self.constants == other.constants

    def __hash__(self) -> int:
        return super().__hash__() if self.constants is None else hash(self.constants)

    def check_constants(self) -> None:
        """Raise ArgumentError if the function reads other constants than when it was flattened."""
        if self.constants is not None and _captured_values(self.thing, []) != self.constants:
            name = getattr(self.thing, "__name__", "a score mod")
            raise ArgumentError(
                f"{name} reads a constant that has changed since the call that it belongs to.",
                action="Leave what a score mod reads as it is until its gradients and weights are "
                "computed, or make another function.",
            )

    def in_words(self) -> list[Any] | None:
        """The expression, whose tables are the function's arrays in the order of the structure."""
        if self.constants is None:
            return None
        count = iter(range(2**31))

        def symbol(value: Any) -> Any:
            if not _is_array(value):
                return value
            shape = array_shape("an array of the score", value)
            table = Table(f"t{next(count)}", kind_of_table(value), tuple(map(int, shape)))
            return table if shape else table[()]

        result = with_replaced_values(self.thing, symbol)(*[Expr(Var(n)) for n in _ARGUMENTS])
        return in_words(as_node(result))

    def without_arrays(self) -> _Function:
        """An equal one that keeps none of the function's arrays alive."""
        fn = with_replaced_values(self.thing, lambda v: _ArrayPlaceholder() if _is_array(v) else v)
        return _Function(fn, self.constants)


class _ArrayPlaceholder:
    """Stands where a function had an array."""

    dtype = shape = None


def _is_plain(fn: Any) -> bool:
    """Whether a function can be called with symbols: it is written in Python."""
    inner = fn.func if isinstance(fn, partial) else fn
    return isinstance(inner, types.FunctionType | types.MethodType) or hasattr(inner, "__dict__")


def _is_array(value: Any) -> bool:
    if isinstance(value, types.ModuleType | np.generic):
        return False  # numpy itself has functions of these names
    try:
        return hasattr(value, "dtype") and hasattr(value, "shape")
    except RuntimeError:  # A tensor that cannot tell its shape, as a nested one.
        return True


def _captured_values(
    fn: Any, arrays: list[Any], outer: tuple[Any, ...] = ()
) -> tuple[Any, ...] | None:
    """The values that a function captures, without its arrays, which are added to `arrays`.

    None if some of it may change without being replaced, as attributes of an object may. `outer`
    are the functions in which this one was found.
    """
    if isinstance(fn, partial):
        inner = _captured_values(fn.func, arrays, outer)
        found = [_constant_key(v, arrays, outer) for v in (*fn.args, *fn.keywords.values())]
        return None if inner is None or None in found else (*inner, tuple(fn.keywords), *found)
    if isinstance(fn, types.MethodType):
        _captured_values(fn.__func__, arrays, outer)
        return None
    if not isinstance(fn, types.FunctionType):
        return None
    if fn in outer:  # A recursive function refers to itself.
        return (fn.__code__,)
    found = [_constant_key(value, arrays, (*outer, fn)) for value in _values_of(fn)]
    return None if None in found else (fn.__code__, *found)


def _values_of(fn: types.FunctionType) -> list[Any]:
    """Values in closure, defaults, keyword defaults, and the globals that the code names."""
    scope = fn.__globals__
    return [
        *[cell.cell_contents for cell in fn.__closure__ or ()],
        *(fn.__defaults__ or ()),
        *(fn.__kwdefaults__ or {}).values(),
        *[scope[name] for name in global_names(fn.__code__) if name in scope],
    ]


def _constant_key(value: Any, arrays: list[Any], outer: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A value from outside as part of a structure, None if it may change."""
    if _is_array(value):
        arrays.append(value)
        return (_ArrayPlaceholder,)
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return type(value), repr(value)
    if value is np or value is math or isinstance(value, np.ufunc | types.BuiltinFunctionType):
        return (value,)
    if isinstance(value, type) and value.__module__ in ("builtins", "numpy"):
        return (value,)
    if isinstance(value, types.FunctionType):
        if value.__module__.partition(".")[0] == "numpy":
            return (value,)
        inner: list[Any] = []
        found = _captured_values(value, inner, outer)
        return None if inner else found
    if isinstance(value, tuple):
        within: list[Any] = []
        entries = [_constant_key(entry, within, outer) for entry in value]
        return None if None in entries or within else (tuple, *entries)
    return None
