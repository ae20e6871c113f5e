"""Read a function of scores and positions: call it with symbols, and note which arrays it indexes.

What the function captures is replaced: an array by a `CapturedArray`, which answers as the array
does and becomes a table where it is indexed with a position; an object by a `CapturedObject`, so
that arrays among its attributes are found too. The result is an expression and its arrays.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from qkv.errors import ArgumentError, QkvError
from qkv.problem.language.replaced_values import is_of_library
from qkv.problem.language.score_functions import ARRAY_AT_POSITION
from qkv.problem.language.symbols import Expr, Table, whole_array

__all__ = [
    "Reading", "explained", "is_array_at_position", "kind_of_table", "signature_unless",
]  # fmt: skip


class Reading:
    """The arrays that a function reads, in the order in which it does.

    Parameters
    ----------
    replaced : callable
        `replaced(fn, symbol)` is a function with the values that it captures replaced.
    """

    def __init__(self, replaced: Callable[..., Any]) -> None:
        self.arrays: list[Any] = []
        self._tables: list[Table] = []
        self._replaced = replaced
        self._within: list[types.FunctionType] = []

    def read(self, fn: Callable[..., Any], *symbols: Expr) -> Any:
        """What the function gives for these symbols."""
        return self._replaced(fn, self.captured)(*symbols)

    def captured(self, value: Any) -> Any:
        """What stands for a value that the function captures."""
        if isinstance(value, _PLAIN) or value is None or isinstance(value, CapturedArray):
            return value
        if isinstance(value, np.generic):
            return CapturedArray(np.asarray(value), self)
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return CapturedArray(value, self)
        if isinstance(value, types.MethodType):
            owner = self.captured(value.__self__)
            return types.MethodType(self._replaced(value.__func__, self.captured), owner)
        if callable(value) and not hasattr(value, "__dict__"):
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        return CapturedObject(value, self)

    def _function(self, fn: types.FunctionType) -> Any:
        """A function that reads what it captures in its turn."""
        # Functions of libraries are given symbols, and answer by name; a recursive function refers
        # to itself.
        if is_of_library(fn, _LIBRARIES) or fn in self._within:
            return fn
        self._within.append(fn)
        try:
            return self._replaced(fn, self.captured)
        finally:
            self._within.pop()

    def table(self, array: Any) -> Table:
        """The table of an array, one for each."""
        for known, table in zip(self.arrays, self._tables, strict=True):
            if known is array:
                return table
        made = Table(f"t{len(self.arrays)}", kind_of_table(array), tuple(map(int, array.shape)))
        self.arrays.append(array)
        self._tables.append(made)
        return made


_LIBRARIES = ("jax", "numpy", "qkv", "scipy", "torch")
"""Packages whose functions hold no array of the user's, so that they are called as they are."""
_PLAIN = (
    bool, int, float, str, complex, bytes, type, types.ModuleType, types.BuiltinFunctionType,
    np.ufunc, Expr, Table,
)  # fmt: skip


def kind_of_table(array: Any) -> Any:
    """The kind of an array's elements, by the name of its type."""
    name = str(array.dtype).removeprefix("torch.")
    if name.startswith("bool"):
        return "bool"
    return "int" if name.startswith(("int", "uint")) else "float"


class CapturedArray:
    """An array of any library, which becomes a table where it is indexed with a position."""

    __hash__ = None  # type: ignore[assignment]  # Python's way to forbid hashing

    def __init__(self, array: Any, reading: Reading) -> None:
        self._array, self._reading = array, reading

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(i, Expr) for i in indices):
            return self._reading.captured(self._array[_unwrapped(index)])
        return self._reading.table(self._array)[tuple([_whole_number(i) for i in indices])]

    def as_number(self) -> Expr:
        """The array's only entry, in an expression."""
        if len(self._array.shape):
            raise whole_array(tuple(self._array.shape))
        entry: Expr = self._reading.table(self._array)[()]
        return entry

    def __len__(self) -> int:
        return len(self._array)

    def __bool__(self) -> bool:
        return bool(self._array)

    def __float__(self) -> float:
        return float(self._array)

    def __int__(self) -> int:
        return int(self._array)

    def __index__(self) -> int:
        return operator.index(self._array)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._array, name)
        if callable(attribute) and not hasattr(attribute, "shape"):
            return lambda *args, **kwargs: self._reading.captured(
                attribute(*_unwrapped(args), **_unwrapped(kwargs))
            )
        return self._reading.captured(attribute) if hasattr(attribute, "shape") else attribute

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """torch's functions: of symbols, an expression; of arrays alone, an array."""
        if _has_symbol(args) or _has_symbol(kwargs or {}):
            return Expr.__torch_function__(func, types, args, kwargs)
        reading = next(a._reading for a in _flat(args) if isinstance(a, CapturedArray))
        return reading.captured(func(*_unwrapped(args), **_unwrapped(kwargs or {})))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if _has_symbol(inputs):
            expression = next(i for i in inputs if isinstance(i, Expr))
            return expression.__array_ufunc__(ufunc, method, *inputs, **kwargs)
        return self._reading.captured(getattr(ufunc, method)(*_unwrapped(inputs), **kwargs))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if _has_symbol(args):
            expression = next(i for i in args if isinstance(i, Expr))
            return expression.__array_function__(func, types, args, kwargs)
        return self._reading.captured(func(*_unwrapped(args), **_unwrapped(kwargs)))


def _binary(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def forwards(self: CapturedArray, other: Any) -> Any:
        if isinstance(other, Expr):
            return function(self.as_number(), other)
        return self._reading.captured(function(self._array, _unwrapped(other)))

    return forwards


def _reflected(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def backwards(self: CapturedArray, other: Any) -> Any:
        if isinstance(other, Expr):
            return function(other, self.as_number())
        return self._reading.captured(function(_unwrapped(other), self._array))

    return backwards


def _unary(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)
    return lambda self: self._reading.captured(function(self._array))


for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor",
    "lshift", "rshift",
):  # fmt: skip
    _plain = _name.rstrip("_")
    setattr(CapturedArray, f"__{_plain}__", _binary(_name))
    setattr(CapturedArray, f"__r{_plain}__", _reflected(_name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(CapturedArray, f"__{_name}__", _binary(_name))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(CapturedArray, f"__{_name}__", _unary(_name))


class CapturedObject:
    """An object whose attributes and entries are captured values."""

    def __init__(self, thing: Any, reading: Reading) -> None:
        self._thing, self._reading = thing, reading

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._thing, name)
        if isinstance(attribute, types.MethodType) and attribute.__self__ is self._thing:
            # Its own method reads its own attributes.
            return types.MethodType(
                self._reading._replaced(attribute.__func__, self._reading.captured), self
            )
        return self._reading.captured(attribute)

    def __getitem__(self, index: Any) -> Any:
        return self._reading.captured(self._thing[_unwrapped(index)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._reading.captured(self._thing(*args, **kwargs))

    def __len__(self) -> int:
        return len(self._thing)


def _flat(thing: Any) -> list[Any]:
    if isinstance(thing, tuple | list):
        return [entry for part in thing for entry in _flat(part)]
    return [*thing.values()] if isinstance(thing, dict) else [thing]


def _has_symbol(thing: Any) -> bool:
    return any(isinstance(entry, Expr) for entry in _flat(thing))


def _unwrapped(thing: Any) -> Any:
    """Arguments with the arrays themselves."""
    if isinstance(thing, CapturedArray):
        return thing._array
    if isinstance(thing, CapturedObject):
        return thing._thing
    if isinstance(thing, tuple | list):
        return type(thing)([_unwrapped(entry) for entry in thing])
    if isinstance(thing, dict):
        return {name: _unwrapped(entry) for name, entry in thing.items()}
    return thing


def _whole_number(index: Any) -> Any:
    return index if isinstance(index, Expr | int) else int(_unwrapped(index))


def signature_unless(fn: Callable[..., Any], count: int) -> inspect.Signature | None:
    """The signature of a function, None if it can be called with so many arguments.

    Functions written in C may have no signature; the call checks them.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*range(count))
    except TypeError:
        return signature
    return None


@contextmanager
def explained(fn: Any) -> Iterator[None]:
    """Errors of other libraries, which were given a symbol, as one that says what to write."""
    try:
        yield
    except QkvError:
        raise
    except (TypeError, IndexError, ValueError, RuntimeError) as error:
        if is_array_at_position(error):
            raise ArgumentError(
                "an array that was not found among what the function captures is read at a "
                "position.",
                action="Give it a name outside of the function, as in w = module.weight, and read "
                "w[head] in it.",
            ) from None
        if not any(symbol in str(error) for symbol in ("Expr", "Captured", "'Table'", "'_Row'")):
            raise
        name = getattr(fn, "__name__", type(fn).__name__)
        raise ArgumentError(
            f"{name} gives a position or score, which is a symbol, to a function that wants an "
            "array.",
            [("it says", str(error).splitlines()[0][:150])],
            "Use operators and functions of NumPy or torch on scores and positions, and index "
            "arrays that are captured by name, as in w[head].",
        ) from error


def is_array_at_position(error: Exception) -> bool:
    """Whether the error of a library says that an array was indexed with an expression.

    NumPy does not say which index it was; here only expressions are not valid ones.
    """
    text = str(error)
    return isinstance(error, IndexError) and (
        text == ARRAY_AT_POSITION or text.startswith("only integers, slices")
    )
