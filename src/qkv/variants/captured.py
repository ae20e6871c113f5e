"""Functions of scores and pairs as part of a call: what they capture, and what of it may change."""

from __future__ import annotations

import builtins
import dis
import math
import types
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from qkv.arguments.readable_checks import array_shape
from qkv.errors import ArgumentError
from qkv.problem.language.expressions import Var, as_node
from qkv.problem.language.nodes import in_words
from qkv.problem.language.reading import Reading, explained, kind_of_table
from qkv.problem.language.replaced_values import (
    closure_values,
    global_names,
    is_of_library,
    reads_unnamed,
    with_replaced_values,
)
from qkv.problem.language.symbols import Expr, Table
from qkv.variants.base import Expression, Opaque

__all__ = ["CapturedFunction", "Condition", "captured_values", "is_plain", "with_arrays"]


class Condition:
    """The function of a mask as part of a structure, or the expression that was read of it."""

    positions_only: ClassVar[bool] = True
    uses_batch_index: ClassVar[bool] = False
    arguments: ClassVar[tuple[str, ...]] = ("batch", "head", "q_pos", "kv_pos")

    def __init__(self, function: Any, arrays: Sequence[Any] = ()) -> None:
        self.function = function
        self.arrays = arrays

    def __call__(self, *arguments: Any) -> Any:
        """The condition for symbols, or numbers, of a pair."""
        return self.function(*arguments)

    def tree_flatten(self) -> tuple[Opaque, list[Any]]:
        """See `qkv.variants.ScoreMod.tree_flatten`."""
        fn = self.function
        if isinstance(fn, Expression):
            return fn, list(self.arrays)
        arrays: list[Any] = []
        constants = captured_values(fn, arrays)
        # A NumPy view in place of a tensor would not have the methods of tensors.
        is_of_others = any(type(array) is not np.ndarray for array in arrays)
        is_read = constants is None or (is_of_others and _loads_attributes(fn))
        if is_read and is_plain(fn):
            return self.read()
        return CapturedFunction(fn, constants, self.arguments), arrays

    @classmethod
    def tree_unflatten(cls, function: Opaque, arrays: Sequence[Any]) -> Condition:
        """The condition whose function reads these arrays."""
        if isinstance(function, Expression):
            return cls(function, tuple(arrays))
        return cls(with_arrays(function, arrays))

    def read(self) -> tuple[Expression, list[Any]]:
        """The expression, and the arrays that it reads."""
        if isinstance(self.function, Expression):
            return self.function, list(self.arrays)
        reading = Reading(with_replaced_values)
        with explained(self.function):
            root = as_node(reading.read(self.function, *[Expr(Var(n)) for n in self.arguments]))
        return Expression(root), reading.arrays


def _loads_attributes(fn: Any) -> bool:
    """Whether a function looks up attributes, as methods are."""
    return not isinstance(fn, types.FunctionType) or _has_attributes(fn.__code__)


@lru_cache(maxsize=256)
def _has_attributes(code: types.CodeType) -> bool:
    parts = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    loads = [step.opname in ("LOAD_ATTR", "LOAD_METHOD") for step in dis.get_instructions(code)]
    return any(loads) or any(map(_has_attributes, parts))


def with_arrays(function: Opaque, arrays: Sequence[Any]) -> Callable[..., Any]:
    """A function with these arrays in the place of those that it captured."""
    if isinstance(function, CapturedFunction):
        function.check_constants()
    following = iter(arrays)
    return with_replaced_values(function.thing, lambda v: next(following) if _is_array(v) else v)


class CapturedFunction(Opaque):
    """A function as part of a call's structure: equal to one of the same code and constants."""

    __slots__ = ("arguments", "constants")

    def __init__(
        self, fn: Callable[..., Any], constants: tuple[Any, ...] | None, arguments: tuple[str, ...]
    ) -> None:
        super().__init__(fn, known=constants is not None)
        self.constants = constants
        self.arguments = arguments

    def __eq__(self, other: object) -> bool:
        if self.constants is None or not isinstance(other, CapturedFunction):
            return super().__eq__(other)
        return self.constants == other.constants

    def __hash__(self) -> int:
        return super().__hash__() if self.constants is None else hash(self.constants)

    def check_constants(self) -> None:
        """Raise ArgumentError if the function reads other constants than when it was flattened."""
        if self.constants is not None and captured_values(self.thing, []) != self.constants:
            name = getattr(self.thing, "__name__", "a function")
            raise ArgumentError(
                f"{name} reads a constant that has changed since the call that it belongs to.",
                action="Leave what a function of scores or pairs reads as it is until its "
                "gradients and weights are computed, or make another function.",
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

        result = with_replaced_values(self.thing, symbol)(*[Expr(Var(n)) for n in self.arguments])
        return in_words(as_node(result))

    def without_arrays(self) -> CapturedFunction:
        """An equal one that keeps none of the function's arrays alive."""
        fn = with_replaced_values(self.thing, lambda v: _ArrayPlaceholder() if _is_array(v) else v)
        return CapturedFunction(fn, self.constants, self.arguments)


class _ArrayPlaceholder:
    """Stands where a function had an array."""

    dtype = shape = None


def is_plain(fn: Any) -> bool:
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


def captured_values(
    fn: Any, arrays: list[Any], outer: tuple[Any, ...] = ()
) -> tuple[Any, ...] | None:
    """The values that a function captures, without its arrays, which are added to `arrays`.

    None if some of it may change without being replaced, as attributes of an object may. `outer`
    are the functions in which this one was found.
    """
    if isinstance(fn, partial):
        inner = captured_values(fn.func, arrays, outer)
        keys = [_constant_key(v, arrays, outer) for v in (*fn.args, *fn.keywords.values())]
        return None if inner is None or None in keys else (*inner, tuple(fn.keywords), *keys)
    if isinstance(fn, types.MethodType):
        captured_values(fn.__func__, arrays, outer)
        return None
    if not isinstance(fn, types.FunctionType):
        return None
    if fn in outer:  # A recursive function refers to itself.
        return (fn.__code__,)
    keys = [_constant_key(value, arrays, (*outer, fn)) for value in _values_of(fn)]
    # Its own attributes may change too.
    may_change = None in keys or fn.__dict__ or reads_unnamed(fn.__code__)
    return None if may_change else (fn.__code__, *keys)


def _values_of(fn: types.FunctionType) -> list[Any]:
    """Values in closure, defaults, keyword defaults, and the globals that the code names."""
    scope = fn.__globals__
    return [
        *closure_values(fn),
        *(fn.__defaults__ or ()),
        *(fn.__kwdefaults__ or {}).values(),
        *[scope[name] for name in global_names(fn.__code__) if name in scope],
    ]


_TYPES_THAT_STAY = frozenset(
    value for module in (builtins, np) for value in vars(module).values() if isinstance(value, type)
)
"""Classes of Python and NumPy, whose attributes do not change."""
_NUMBERS_AND_WORDS = frozenset({type(None), bool, int, float, str})
"""Classes whose objects have no attributes that can be set, as those of subclasses may have."""


def _constant_key(value: Any, arrays: list[Any], outer: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A value from outside as part of a structure, None if it may change."""
    if _is_array(value):
        arrays.append(value)
        return (_ArrayPlaceholder,)
    if type(value) in _NUMBERS_AND_WORDS or isinstance(value, np.generic):
        return type(value), repr(value)
    if value is np or value is math or isinstance(value, np.ufunc):
        return (value,)
    if isinstance(value, types.BuiltinFunctionType):
        # A method reads its object, as `get` of a dictionary does.
        is_method = not isinstance(value.__self__, types.ModuleType | None)
        return None if is_method else (value,)
    if isinstance(value, type) and value in _TYPES_THAT_STAY:
        return (value,)
    if isinstance(value, types.FunctionType):
        if is_of_library(value, ("numpy",)):
            return (value,)
        inner: list[Any] = []
        key = captured_values(value, inner, outer)
        return None if inner else key
    if type(value) is tuple:
        within: list[Any] = []
        entries = [_constant_key(entry, within, outer) for entry in value]
        return None if None in entries or within else (tuple, *entries)
    return None
