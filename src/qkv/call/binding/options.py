"""The options that all public attention functions share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict, TypeVar

from qkv.call.binding.unknown_keywords import keyword_error
from qkv.problem.building.check import Layout

__all__ = ["DEFAULTS", "OptionValues", "Options", "option_values", "with_options"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """Keyword arguments of `attention`, `inspect`, `plan`, `vjp` and `jvp`.

    scale : float, optional
        What `q . k` is multiplied with; `head_dim ** -0.5` unless given.
    layout : "bhld" or "blhd"
        Order of heads and length in query, key, value and output.
    q_offset : int, integer array over the leading dimensions, "start", "end" or None
        Position of query row 0. "start" is 0, "end" puts the last query at the last key.
    kv_offset : int or integer array over the leading dimensions
        Position of key row 0.
    backend : str
        "auto", or a name that `qkv.plan` lists.
    """

    scale: float | None
    layout: Layout
    q_offset: Any
    kv_offset: Any
    backend: str


class OptionValues(NamedTuple):
    """All options of one call, those that were not given at their defaults."""

    scale: Any = None
    layout: Any = "bhld"
    q_offset: Any = None
    kv_offset: Any = 0
    backend: Any = "auto"


DEFAULTS = OptionValues()
_OPTIONS = frozenset(OptionValues._fields)


_KEYWORDS: dict[str, tuple[list[str], list[str]]] = {}
"""All keywords of each function that takes the options, and those that it must be given."""


def option_values(function: str, given: Mapping[str, Any]) -> OptionValues:
    """The options of a call of `function`.

    Raises
    ------
    KeywordError
        For a keyword that is none of them; it is a TypeError, as Python raises for functions that
        name theirs.
    """
    if not given:
        return DEFAULTS
    for name in given:  # Not by a TypeError, which torch's compiler does not see.
        if name not in _OPTIONS:
            raise keyword_error(function, given, *_KEYWORDS[function])
    return OptionValues(**given)


def with_options(function: Function, name: str = "") -> Function:
    """Add the options to the signature of a function, for `help` and for editors.

    `name` is what `option_values` knows it by, if there is another function of its name.
    """
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in OptionValues._field_defaults.items()
    ]
    keywords = [p for p in (*own, *options) if p.kind is p.KEYWORD_ONLY]
    required = [p.name for p in keywords if p.default is p.empty]
    _KEYWORDS[name or function.__name__] = [p.name for p in keywords], required
    # mypy does not know attributes of functions.
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function
