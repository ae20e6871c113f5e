"""What arguments of mechanisms may be, declared where they are annotated and checked in one place.

`Mechanism` checks the arguments of every method whose annotations hold one of these declarations,
before the method runs, in every subclass:

    def __init__(self, embed_dim: Size, *, window: Whole, eps: NotNegative = 1e-5) -> None: ...

In an `__init__`, plain annotations are declarations too: `float` is a finite number, `bool` is
True or False, and a class is an instance of it. Other annotations are not checked.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from numbers import Real
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, Union, Unpack, get_args, get_origin, get_type_hints

import numpy as np

from qkv.arrays import kind_of
from qkv.errors import ArgumentError, DTypeError, ShapeError

__all__ = [
    "LARGEST",
    "MOST_RANDOM",
    "Arrays",
    "Interval",
    "NotNegative",
    "Places",
    "Positive",
    "Rows",
    "Size",
    "Whole",
    "check_declared",
    "checked_size",
    "refuse_many_numbers",
]

LARGEST = 2**53
"""The largest size: up to it every whole number is a float64 as well."""

MOST_RANDOM = 2**28
"""How many random numbers a mechanism draws, which are 2 GiB; larger weights are to be given."""

Rule: TypeAlias = Callable[[str, Any], Any]
"""A function of the name and value of an argument, which returns the value, or raises."""


def checked_size(name: str, given: Any, least: int = 1) -> int:
    """A whole number from `least` to `LARGEST` as an int.

    Raises
    ------
    ArgumentError
        Naming the argument.

    Examples
    --------
    >>> checked_size("window", np.int64(3))
    3
    """
    whole = isinstance(given, int | np.integer) and not isinstance(given, bool)
    if not whole or not least <= given <= LARGEST:
        what = "a positive integer" if least == 1 else f"a whole number of {least} or more"
        what = f"at most {LARGEST}" if whole and given > LARGEST else what
        raise ArgumentError(
            f"{name}={shown(given)} is not {what}.", action=f"Pass {name} >= {least}, as it fits."
        )
    return int(given)


def refuse_many_numbers(what: str, numbers: int) -> None:
    """Refuse to draw more than `MOST_RANDOM` random numbers.

    Raises
    ------
    ArgumentError
        With how many there would be.
    """
    if numbers > MOST_RANDOM:
        raise ArgumentError(
            f"{what} would hold {numbers:.3g} random numbers; at most {MOST_RANDOM} are drawn."
            if numbers < 10**300
            else f"{what} would hold more random numbers than the {MOST_RANDOM} that are drawn.",
            action="Choose smaller sizes, or pass the arrays.",
        )


def shown(given: Any) -> str:
    """A value in a message: short, and without fail."""
    try:
        return f"{given!r:.60}"
    except Exception:  # An integer of thousands of digits, or a `__repr__` that fails.
        return f"({type(given).__qualname__})"


def _size(least: int) -> Rule:
    return lambda name, given: checked_size(name, given, least)


def _number(least: float, most: float = math.inf, *, open_at_least: bool = False) -> Rule:
    """A finite number in a range; `open_at_least` leaves `least` itself out."""

    def rule(name: str, given: Any) -> float:
        number = math.nan
        if isinstance(given, Real) and not isinstance(given, bool | np.bool_):
            try:
                number = float(given)
            except OverflowError:
                number = math.inf
        if not math.isfinite(number) or not least <= number <= most or (
            open_at_least and number == least
        ):  # fmt: skip
            above = "" if least == -math.inf else f" {'above' if open_at_least else 'not below'} "
            bound = f"{least:g}" if above else ""
            raise ArgumentError(
                f"{name}={shown(given)} is not a finite number{above}{bound}.",
                action=f"Pass {name} as a number.",
            )
        return number

    return rule


def _interval(name: str, given: Any) -> tuple[float, float]:
    pair = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    real = [x for x in pair if isinstance(x, Real) and not isinstance(x, bool)]
    if len(pair) != 2 or len(real) != 2 or not real[0] <= real[1]:
        raise ArgumentError(
            f"{name}={shown(given)} is not a smallest and a largest number.",
            action=f"Pass {name} as two numbers, the smaller one first.",
        )
    low, high = (max(min(x, 1e308), -1e308) if isinstance(x, int) else float(x) for x in real)
    return float(low), float(high)


def _places(name: str, given: Any) -> list[int]:
    """Whole numbers of 0 or more, from a sequence or an array of one dimension."""
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise ArgumentError(
            f"{name}={shown(given)} is not a sequence of whole numbers.",
            action=f"Pass {name} as a list.",
        )
    return [checked_size(f"{name}[{i}]", entry, 0) for i, entry in enumerate(given)]


def _rows(name: str, given: Any) -> Any:
    """An array (..., n, width) of a floating type."""
    _array(name, given)
    if given.ndim < 2:
        raise ShapeError(
            f"{name} has shape {tuple(given.shape)}, not (..., n, width).",
            action="Pass one sequence of rows or more.",
        )
    if not str(given.dtype).removeprefix("torch.").startswith(("float", "bfloat")):
        raise DTypeError(
            f"{name} has dtype {given.dtype}, not a floating type.",
            action="Convert it, to float32 for example.",
        )
    return given


def _array(name: str, given: Any) -> Any:
    """An array of a library that qkv knows."""
    if kind_of(given) is None or not hasattr(given, "ndim") or not hasattr(given, "dtype"):
        raise DTypeError(
            f"{name} is a {type(given).__module__}.{type(given).__qualname__}, not an array.",
            action="Pass a NumPy array, a torch tensor or a JAX array.",
        )
    return given


def _arrays(name: str, given: Any) -> Mapping[str, Any]:
    """A mapping of strings to arrays of numbers."""
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ArgumentError(
            f"{name} is not a mapping of names to arrays, but a {type(given).__qualname__}.",
            action=f"Pass {name} as a dict of str to array.",
        )
    for key, array in given.items():
        kind = str(_array(key, array).dtype).removeprefix("torch.")
        if not kind.startswith(("float", "bfloat", "int", "uint")):
            raise DTypeError(f"{key} has dtype {kind}, which holds no real numbers.",
                             action="Convert it, to float32 for example.")  # fmt: skip
    return given


Size: TypeAlias = Annotated[int, _size(1)]
"""A positive integer."""
Whole: TypeAlias = Annotated[int, _size(0)]
"""A whole number of 0 or more."""
Positive: TypeAlias = Annotated[float, _number(0.0, open_at_least=True)]
"""A finite number above 0."""
NotNegative: TypeAlias = Annotated[float, _number(0.0)]
"""A finite number of 0 or more."""
Interval: TypeAlias = Annotated[tuple[float, float], _interval]
"""Two numbers, the smaller one first."""
Places: TypeAlias = Annotated[Sequence[int], _places]
"""Whole numbers of 0 or more."""
Rows: TypeAlias = Annotated[Any, _rows]
"""An array (..., n, width) of a floating type."""
Arrays: TypeAlias = Annotated[Mapping[str, Any], _arrays]
"""Arrays of numbers by name."""


def check_declared(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that checks its declared arguments first; the method itself if none is declared.

    Annotations are read at the first call, when all that they name is defined.
    """
    annotations = inspect.get_annotations(method)
    is_init = method.__name__ == "__init__"
    if not is_init and not any(name in str(a) for a in annotations.values() for name in _NAMES):
        return method

    @wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        positional, named = _rules(method)
        given = list(args)
        for place, name, rule in positional:
            if place < len(given):
                given[place] = rule(name, given[place])
        for name, value in kwargs.items():
            if name in named:
                kwargs[name] = named[name](name, value)
        return method(*given, **kwargs)

    return checked


_NAMES = ("Size", "Whole", "Positive", "NotNegative", "Interval", "Places", "Rows", "Arrays")


@cache
def _rules(method: Callable[..., Any]) -> tuple[list[tuple[int, str, Rule]], dict[str, Rule]]:
    """The rules of arguments by place and by name."""
    hints = get_type_hints(method, include_extras=True)
    plain = method.__name__ == "__init__"
    positional: list[tuple[int, str, Rule]] = []
    named: dict[str, Rule] = {}
    for place, (name, parameter) in enumerate(inspect.signature(method).parameters.items()):
        hint = hints.get(name)
        if parameter.kind is parameter.VAR_KEYWORD:
            if get_origin(hint) is Unpack:
                options = get_type_hints(get_args(hint)[0], include_extras=True)
                rules = {option: _rule(of, plain) for option, of in options.items()}
                named |= {option: rule for option, rule in rules.items() if rule is not None}
            continue
        rule = _rule(hint, plain)
        if rule is None:
            continue
        if parameter.kind is not parameter.KEYWORD_ONLY:
            positional.append((place, name, rule))
        if parameter.kind is not parameter.POSITIONAL_ONLY:
            named[name] = rule
    return positional, named


def _rule(hint: Any, plain: bool) -> Rule | None:
    """The rule of an annotation, None if it declares nothing."""
    if get_origin(hint) in (Union, UnionType):
        parts = get_args(hint)
        rules = [rule for part in parts if (rule := _rule(part, plain)) is not None]
        if len(rules) != 1 or NoneType not in parts:
            return None
        return lambda name, given: None if given is None else rules[0](name, given)
    if get_origin(hint) is Annotated:
        found: Rule = hint.__metadata__[0]
        return found
    if not plain:
        return None
    if hint is float:
        return _number(-math.inf)
    return _instance(hint) if isinstance(hint, type) and hint not in (Any, NoneType) else None


def _instance(kind: type) -> Rule:
    also = (kind, np.bool_) if kind is bool else (kind,)

    def rule(name: str, given: Any) -> Any:
        if not isinstance(given, also):
            raise ArgumentError(
                f"{name}={shown(given)} is not a {kind.__name__}.",
                action=f"Pass {name} as a {kind.__name__}.",
            )
        return bool(given) if kind is bool else given

    return rule
