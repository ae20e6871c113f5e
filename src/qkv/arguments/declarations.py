"""What arguments may be, declared where they are annotated and checked in one place.

`checked` checks the arguments of a function, or of the methods of a class, before they run:

    @checked
    def scaling(width: Size, *, rate: NotNegative = 1e-5, names: Sequence[str] = ()) -> None: ...

Annotations are the declarations. `int` is a whole number, `float` a finite one, `str`, `bool` and
other classes are instances of them, `Sequence[str]` a sequence whose entries are checked too, and
`X | None` may be left out. The names below say more. `Any`, arrays and type variables are not
checked here; functions that take arrays check them where they read them.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from numbers import Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, Unpack, get_args, get_origin

import numpy as np

from qkv._dynamo import is_reading
from qkv.errors import ArgumentError, FileError

__all__ = [
    "LARGEST", "Indent", "Interval", "NotNegative", "Places", "Positive", "Rule", "Size",
    "TextOrIds", "Whole", "checked", "checked_integer", "checked_size", "is_integer", "shown",
]  # fmt: skip

T = TypeVar("T")

LARGEST = 2**53
"""The largest size: up to it every whole number is a float64 as well."""

Rule: TypeAlias = Callable[[str, Any], Any]
"""A function of the name and value of an argument, which returns the value, or raises."""


def is_integer(given: Any) -> typing.TypeGuard[int]:
    """Whether this is an integer of Python or NumPy, which True and False are not."""
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def checked_size(name: str, given: Any, least: int = 1, most: int = LARGEST) -> int:
    """A whole number from `least` to `most` as an int.

    Raises
    ------
    ArgumentError
        Naming the argument.

    Examples
    --------
    >>> checked_size("window", np.int64(3))
    3
    """
    whole = is_integer(given)
    if whole and least <= given <= most:
        return given if isinstance(given, int) else int(given)
    if whole and given > most:
        what, advice = f"at most {most}", f"{name} <= {most}"
    elif least == 1:
        what, advice = "a positive integer", f"{name} >= 1"
    elif least >= 0:
        what, advice = f"a whole number of {least} or more", f"{name} >= {least}"
    else:
        what, advice = "a whole number", f"{name} as an integer"
    raise ArgumentError(f"{name}={shown(given)} is not {what}.", action=f"Pass {advice}.")


def shown(given: Any, most: int = 60) -> str:
    """A value in a message: `most` characters, and without fail."""
    try:
        return repr(given)[:most]
    except Exception:  # An integer of thousands of digits, or a `__repr__` that fails.
        return f"({type(given).__qualname__})"


def _size(least: int, most: int = LARGEST) -> Rule:
    return lambda name, given: checked_size(name, given, least, most)


def checked_integer(name: str, given: Any) -> int:
    """A whole number whose products with two others like it are float64 as well."""
    whole = is_integer(given)
    if not whole or abs(int(given)) > 2**256:
        limit = " within 2**256" if whole else ""
        raise ArgumentError(
            f"{name}={shown(given)} is not a whole number{limit}.",
            action=f"Pass {name} as an integer.",
        )
    return given if isinstance(given, int) else int(given)


def _number(least: float, *, above: bool = False) -> Rule:
    """A finite number that is not below `least`, nor equal to it if `above`."""
    words = f" {'above' if above else 'not below'} {least:g}" if least > -math.inf else ""

    def rule(name: str, given: Any) -> float:
        number = math.nan
        if isinstance(given, Real) and not isinstance(given, bool | np.bool_):
            try:
                number = float(given)
            except OverflowError:
                number = math.inf
        if not math.isfinite(number) or number < least or (above and number == least):
            raise ArgumentError(
                f"{name}={shown(given)} is not a finite number{words}.",
                action=f"Pass {name} as a number.",
            )
        return given if isinstance(given, int | float) else number

    return rule


def _interval(name: str, given: Any) -> tuple[float, float]:
    pair = tuple(given) if isinstance(given, list | tuple) and len(given) == 2 else ()
    if not pair or not all(isinstance(x, Real) for x in pair) or not pair[0] <= pair[1]:
        raise ArgumentError(
            f"{name}={shown(given)} is not a smallest and a largest number.",
            action=f"Pass {name} as two numbers, the smaller one first.",
        )
    low, high = (max(-math.inf, min(x, math.inf)) for x in pair)
    try:
        return float(low), float(high)
    except OverflowError:
        raise ArgumentError(
            f"{name} is beyond the range of float64.", action=f"Pass {name} as floating numbers."
        ) from None


def _places(name: str, given: Any) -> list[int]:
    """Whole numbers of 0 or more, from a sequence or an array of one dimension."""
    if isinstance(given, np.ndarray) and given.ndim == 1:
        given = given.tolist()
    return [checked_size(f"{name}[{i}]", x, 0) for i, x in enumerate(_sequence(name, given))]


def _sequence(name: str, given: Any) -> Any:
    unordered = isinstance(given, str | bytes | bytearray | Mapping | collections.abc.Set)
    kind = type(given)
    if unordered or not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")) or (
        getattr(given, "ndim", 1) != 1
    ):  # fmt: skip
        raise ArgumentError(
            f"{name}={shown(given)} is not a sequence.", action=f"Pass {name} as a list."
        )
    return given


def _text_or_ids(name: str, given: Any) -> Any:
    return given if isinstance(given, str) else _entries(checked_integer)(name, given)


Size: TypeAlias = Annotated[int, _size(1)]
"""A positive integer."""
Whole: TypeAlias = Annotated[int, _size(0)]
"""A whole number of 0 or more."""
Indent: TypeAlias = Annotated[int, _size(0, 100)]
"""Spaces for each level of JSON."""
Positive: TypeAlias = Annotated[float, _number(0.0, above=True)]
"""A finite number above 0."""
NotNegative: TypeAlias = Annotated[float, _number(0.0)]
"""A finite number of 0 or more."""
Interval: TypeAlias = Annotated[tuple[float, float], _interval]
"""Two numbers, the smaller one first."""
Places: TypeAlias = Annotated[Sequence[int], _places]
"""Whole numbers of 0 or more."""
TextOrIds: TypeAlias = Annotated[str | Sequence[int], _text_or_ids]
"""A text, or the ids of its tokens."""


def checked(thing: T) -> T:
    """A function, or a class with methods, that checks its arguments before it runs.

    Annotations are read at the first call, when all that they name is defined.
    """
    if isinstance(thing, type):
        for name, member in tuple(vars(thing).items()):
            inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if not inspect.isfunction(inner) or (name.startswith("_") and name != "__init__"):
                continue
            new = checked(inner)
            setattr(thing, name, new if inner is member else type(member)(new))
        return thing
    function: Any = thing
    if hasattr(function, "_is_checked"):
        return thing
    if {"Any", "None", "Self"}.issuperset(map(str, inspect.get_annotations(function).values())):
        return thing

    @wraps(function)
    def checked_first(*args: Any, **kwargs: Any) -> Any:
        if is_reading():
            return function(*args, **kwargs)
        rules = _rules(function)
        given = list(args)
        for place, name, rule in rules.by_place:
            if place < len(given):
                given[place] = rule(name, given[place])
        if rules.of_rest is not None:
            place, name, rule = rules.of_rest
            given[place:] = [rule(name, value) for value in given[place:]]
        for name, value in kwargs.items():
            of_name = rules.by_name.get(name, rules.of_options)
            if of_name is not None:
                kwargs[name] = of_name(name, value)
        return function(*given, **kwargs)

    checked_first._is_checked = True  # type: ignore[attr-defined]  # an attribute of a function
    return checked_first  # type: ignore[return-value]  # it takes what the function takes


@dataclass
class _Rules:
    """The rules of the arguments of a function.

    Attributes
    ----------
    by_place, by_name
        Of parameters that may be given so.
    of_rest
        Of `*arguments`, which begin at a place.
    of_options
        Of keywords that are not parameters.
    """

    by_place: list[tuple[int, str, Rule]] = field(default_factory=list)
    by_name: dict[str, Rule | None] = field(default_factory=dict)
    of_rest: tuple[int, str, Rule] | None = None
    of_options: Rule | None = None


@cache
def _rules(function: Callable[..., Any]) -> _Rules:
    hints, rules = _hints(function), _Rules()
    for place, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        hint = hints.get(name)
        if parameter.kind is parameter.VAR_KEYWORD and get_origin(hint) is Unpack:
            options = typing.get_type_hints(get_args(hint)[0], include_extras=True)
            rules.by_name |= {option: _rule(of) for option, of in options.items()}
            continue
        rule = _rule(hint)
        if parameter.kind is parameter.VAR_KEYWORD:
            rules.of_options = rule
        elif parameter.kind is parameter.VAR_POSITIONAL:
            rules.of_rest = None if rule is None else (place, name, rule)
        else:
            if rule is not None and parameter.kind is not parameter.KEYWORD_ONLY:
                rules.by_place.append((place, name, rule))
            if parameter.kind is not parameter.POSITIONAL_ONLY:
                rules.by_name[name] = rule
    return rules


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations one by one, as some name types that are imported for type checkers only."""
    hints = {}
    for name, hint in inspect.get_annotations(function).items():
        if isinstance(hint, str):
            try:
                hint = eval(hint, inspect.unwrap(function).__globals__)
            except NameError:
                continue
        hints[name] = hint
    return hints


def _rule(hint: Any) -> Rule | None:
    """The rule of an annotation, None if it declares nothing."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        rule: Rule = hint.__metadata__[0]
        return rule
    if origin in (Union, UnionType):
        return _rule_of_union(parts)
    if hint is int:
        return checked_integer
    if hint is float:
        return _number(-math.inf)
    if origin is Literal:
        return _choice(parts)
    if origin is collections.abc.Sequence:
        return _entries(_rule(parts[0]))
    if origin is collections.abc.Mapping:
        return _pairs(*(_entries(_rule(part)) for part in parts))
    if origin is tuple and Ellipsis not in parts:
        return _items([_rule(part) for part in parts])
    kind = origin if isinstance(origin, type) else hint
    if not isinstance(kind, type) or kind in (Any, NoneType, object, np.ndarray, tuple):
        return None
    return _instance((kind,))


def _rule_of_union(parts: tuple[Any, ...]) -> Rule | None:
    others = [part for part in parts if part is not NoneType]
    kinds = [part if isinstance(part, type) else get_origin(part) for part in others]
    if len(others) == 1:
        rule = _rule(others[0])
    elif all(isinstance(kind, type) and kind is not Any for kind in kinds):
        rule = _instance(tuple(kinds))
    else:
        rule = None
    if rule is None or len(others) == len(parts):
        return rule
    inner = rule
    return lambda name, given: None if given is None else inner(name, given)


def _entries(of_entry: Rule | None) -> Rule:
    def rule(name: str, given: Any) -> Any:
        _sequence(name, given)
        if of_entry is None:
            return given
        return [of_entry(f"{name}[{i}]", entry) for i, entry in enumerate(given)]

    return rule


def _pairs(of_keys: Rule, of_values: Rule) -> Rule:
    def rule(name: str, given: Any) -> Any:
        of_keys(f"list({name})", [*_instance((Mapping,))(name, given)])
        of_values(f"list({name}.values())", [*given.values()])
        return given

    return rule


def _items(of_items: list[Rule | None]) -> Rule:
    def rule(name: str, given: Any) -> Any:
        if not isinstance(given, tuple | list) or len(given) != len(of_items):
            raise ArgumentError(
                f"{name}={shown(given)} is not a tuple of {len(of_items)}.",
                action=f"Pass {name} as a tuple.",
            )
        checks = enumerate(zip(of_items, given, strict=True))
        return tuple(x if of is None else of(f"{name}[{i}]", x) for i, (of, x) in checks)

    return rule


def _choice(values: tuple[Any, ...]) -> Rule:
    def rule(name: str, given: Any) -> Any:
        if not any(type(given) is type(value) and given == value for value in values):
            raise ArgumentError(
                f"{name}={shown(given)} is none of {', '.join(map(repr, values))}.",
                action="Pass one of them.",
            )
        return given

    return rule


def _instance(kinds: tuple[type, ...]) -> Rule:
    names = " or ".join("path" if kind is os.PathLike else kind.__name__ for kind in kinds)
    protocols = {kind: _methods(kind) for kind in kinds if getattr(kind, "_is_protocol", False)}
    classes = tuple(kind for kind in kinds if kind not in protocols and kind is not int)
    is_path = os.PathLike in kinds
    classes += (np.bool_,) * (bool in classes)

    def rule(name: str, given: Any) -> Any:
        is_known = isinstance(given, classes) or (int in kinds and is_integer(given))
        if not is_known and not any(
            all(callable(getattr(type(given), method, None)) for method in methods)
            for methods in protocols.values()
        ):
            raise ArgumentError(
                f"{name}={shown(given)} is not a {names}.", action=f"Pass {name} as a {names}."
            )
        if is_path and isinstance(given, str) and not _names_a_file(given):
            raise FileError(
                f"{name}={shown(given)} is not a path: no name of a file has these characters.",
                action=f"Pass {name} without them.",
            )
        return bool(given) if isinstance(given, np.bool_) else given

    return rule


def _names_a_file(path: str) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeError:
        return False


def _methods(protocol: type) -> tuple[str, ...]:
    """The methods of a protocol; its properties are not read."""
    return tuple(n for n, m in vars(protocol).items() if n[0] != "_" and inspect.isfunction(m))
