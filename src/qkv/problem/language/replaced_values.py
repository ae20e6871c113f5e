"""Functions with other values in the place of those that they capture."""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from qkv.errors import ArgumentError

__all__ = [
    "closure_values", "global_names", "is_of_library", "reads_unnamed", "with_replaced_values",
]  # fmt: skip


def with_replaced_values(
    fn: Callable[..., Any], symbol: Callable[[Any], Any]
) -> Callable[..., Any]:
    """The function with values replaced: in closure, defaults and the globals that it names."""
    if isinstance(fn, partial):
        return partial(
            with_replaced_values(fn.func, symbol),
            *map(symbol, fn.args),
            **{name: symbol(value) for name, value in fn.keywords.items()},
        )
    if isinstance(fn, types.MethodType):
        return types.MethodType(with_replaced_values(fn.__func__, symbol), symbol(fn.__self__))
    if not isinstance(fn, types.FunctionType):
        call = getattr(type(fn), "__call__", None)  # noqa: B004 - it is looked at, not tested
        if not isinstance(call, types.FunctionType):
            return fn
        return types.MethodType(with_replaced_values(call, symbol), symbol(fn))
    closure = fn.__closure__ and tuple(
        types.CellType(symbol(value)) for value in closure_values(fn)
    )
    defaults = fn.__defaults__ and tuple(map(symbol, fn.__defaults__))
    keyword_defaults = fn.__kwdefaults__ and {k: symbol(v) for k, v in fn.__kwdefaults__.items()}
    scope = _scope_of_code(fn)
    scope.update({n: symbol(scope[n]) for n in global_names(fn.__code__) if n in scope})
    scope.setdefault("__builtins__", builtins)
    made = types.FunctionType(fn.__code__, scope, fn.__name__, defaults, closure)
    made.__kwdefaults__ = keyword_defaults
    made.__dict__.update({name: symbol(value) for name, value in fn.__dict__.items()})
    return made


_OF_MODULES = ("__name__", "__package__", "__spec__", "__path__", "__builtins__")
"""What an import or a class inside a function reads of its globals without naming it."""
_READ_BY_NAME = frozenset({"globals", "eval", "exec", "__globals__", "__import__"})
"""Names of what finds globals that the code does not name."""
_MODULES_THAT_STAY = frozenset({"math", "numpy"})


def _scope_of_code(fn: types.FunctionType) -> dict[str, Any]:
    """The globals that the function can read.

    What is made of a function may be kept with a call that is remembered: with all globals of its
    module, models and caches that the user has dropped would stay in memory.
    """
    scope, names = fn.__globals__, global_names(fn.__code__)
    if not _READ_BY_NAME.isdisjoint(names):
        return dict(scope)
    return {name: scope[name] for name in (*_OF_MODULES, *names) if name in scope}


def closure_values(fn: types.FunctionType) -> list[Any]:
    """The values of the variables that a function reads of those around it.

    Raises
    ------
    ArgumentError
        If one has none yet.
    """
    try:
        return [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:
        raise ArgumentError(
            f"{fn.__name__} reads a variable of the function around it that has no value yet.",
            [("it reads", ", ".join(fn.__code__.co_freevars))],
            "Give the variable its value before the call.",
        ) from None


def is_of_library(fn: types.FunctionType, libraries: Sequence[str]) -> bool:
    """Whether a function was written in one of these packages, and reads nothing of others.

    `__module__` does not tell: `functools.wraps` gives it to functions of the user. A scope of
    `exec` may have no name, or any object as one.
    """
    package = str(fn.__globals__.get("__name__")).partition(".")[0]
    return fn.__closure__ is None and package in libraries


@lru_cache(maxsize=256)
def reads_unnamed(code: types.CodeType) -> bool:
    """Whether the code may read values that are not among its globals, as of what it imports."""
    imports = [step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"]
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return (
        not _MODULES_THAT_STAY.issuperset(imports)
        or not _READ_BY_NAME.isdisjoint(code.co_names)
        or any(map(reads_unnamed, inner))
    )


@lru_cache(maxsize=256)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code looks up, those of functions inside it too, in a fixed order."""
    inner = [global_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return tuple(sorted({*code.co_names, *(name for names in inner for name in names)}))
