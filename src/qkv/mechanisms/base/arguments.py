"""What callers pass to mechanisms: sizes, options, sequences and names of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Set
from itertools import zip_longest
from typing import Any

from qkv.arguments.declarations import shown
from qkv.arrays import kind_of
from qkv.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError

__all__ = [
    "all_three",
    "broadcastable",
    "one_sequence",
    "refuse_one_by_one",
    "refuse_options",
    "refuse_other_batches",
    "refuse_other_values",
    "refuse_other_widths",
    "refuse_unknown_options",
    "token_names",
]


def all_three(x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Query, key and value: the key is the query unless given, and the value is the key.

    Raises
    ------
    DTypeError
        They are of several libraries, or tensors of several types or devices.
    """
    key = x if key is None else key
    value = key if value is None else value
    for name, array in (("key", key), ("value", value)):
        if array is not x and _library_and_type(array) != _library_and_type(x):
            raise DTypeError(
                f"{name} is of {_library_and_type(array)} and x of {_library_and_type(x)}.",
                action=f"Convert {name} to what x is.",
            )
    return x, key, value


def _library_and_type(array: Any) -> str:
    """What has to agree; NumPy and JAX find a common type themselves."""
    kind = kind_of(array)
    return f"{array.dtype} on {array.device}" if kind == "torch" else str(kind)


def one_sequence(x: Any, key: Any, value: Any) -> None:
    """Refuse arrays with leading dimensions: an explanation is of one sequence.

    Raises
    ------
    ShapeError
        An array is not (n, width).
    """
    for name, array in {"x": x, "key": key, "value": value}.items():
        if array.ndim != 2:
            raise ShapeError(
                f"one sequence (n, width) is shown; {name} has shape {tuple(array.shape)}.",
                action=f"Pass one of them, as in {name}[0].",
            )


def refuse_one_by_one(mechanism: str, *, causal: bool) -> None:
    """Refuse single tokens where earlier ones may look at later ones.

    Raises
    ------
    UnsupportedError
        The mechanism is not causal.
    """
    if not causal:
        raise UnsupportedError(
            f"{mechanism} with causal=False cannot be computed token by token.",
            action="Pass the whole sequence to a call, or use causal=True.",
        )


def refuse_options(mechanism: str, options: Mapping[str, Any], *names: str) -> None:
    """Refuse options of `ProjectedAttention` that mean nothing in this mechanism.

    Raises
    ------
    ArgumentError
        Naming the first that is given.
    """
    for name in names:
        given = options.get(name)
        if given is not None and given is not False:
            raise ArgumentError(
                f"{mechanism} does not take {name}: it has no n x n scores with a softmax.",
                action=f"Leave {name} out.",
            )


def refuse_other_values(
    mechanism: str, options: Mapping[str, Any], fixed: Mapping[str, Any]
) -> None:
    """Refuse options whose values define the mechanism and are given otherwise.

    Raises
    ------
    ArgumentError
        Naming the first.
    """
    for name, value in fixed.items():
        if options.get(name, value) != value:
            raise ArgumentError(
                f"{mechanism} always has {name}={value}; given is {name}={shown(options[name])}.",
                action=f"Leave {name} out.",
            )


def broadcastable(*shapes: tuple[int, ...]) -> bool:
    """Whether arrays of these shapes broadcast with one another.

    Examples
    --------
    >>> broadcastable((2, 1), (3,), ()), broadcastable((2,), (3,))
    (True, False)
    """
    places = zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)
    return all(len(set(sizes) - {1}) < 2 for sizes in places)


def refuse_other_batches(x: Any, key: Any, value: Any) -> None:
    """Refuse sequences whose leading dimensions do not broadcast with one another.

    Raises
    ------
    ShapeError
        With the shapes.
    """
    given = {"x": x, "key": key, "value": value}
    shapes = {name: tuple(array.shape) for name, array in given.items()}
    if not broadcastable(*(shape[:-2] for shape in shapes.values())):
        raise ShapeError(
            "leading dimensions of x, key and value do not broadcast with one another.",
            [(name, str(shape)) for name, shape in shapes.items()],
            "Let them be equal, or 1 where they are the same for all.",
        )


def refuse_other_widths(mechanism: str, name: str, rows: Any, width: int) -> None:
    """Refuse rows of another width than the mechanism reads.

    Raises
    ------
    ShapeError
        Naming the argument.
    """
    if rows.ndim < 2 or rows.shape[-1] != width:
        raise ShapeError(
            f"{mechanism} reads {name} as rows of {width} numbers.",
            [(name, str(tuple(rows.shape)))],
            f"Pass {name} as (..., n, {width}).",
        )


def refuse_unknown_options(mechanism: type, unknown: Set[str], options: Set[str]) -> None:
    """Refuse options that a mechanism does not have, and name those that it has.

    Parameters
    ----------
    mechanism : subclass of Mechanism
        Whose further keywords are options too.
    unknown, options : set of str

    Raises
    ------
    ArgumentError
        Naming all that are unknown.
    """
    if unknown:
        parameters = inspect.signature(mechanism).parameters.values()
        further = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        raise ArgumentError(
            f"{getattr(mechanism, 'name', mechanism)} has no option {', '.join(sorted(unknown))}.",
            action=f"Options are {', '.join(sorted(options | further))}.",
        )


def token_names(
    tokens: Sequence[str] | None, n: int, name: str = "tokens", rows: str = "x"
) -> tuple[str, ...]:
    """The names of `n` tokens, their numbers by default.

    Parameters
    ----------
    tokens : sequence of str, optional
    n : int
    name, rows : str
        What the argument and the array whose rows it names are called.

    Raises
    ------
    ArgumentError
        There are not `n` of them.
    """
    if tokens is None:
        return tuple(map(str, range(n)))
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or len(tokens) != n:
        raise ArgumentError(
            f"{name}={shown(tokens)} are not names of the {n} rows of {rows}.",
            action="Pass one for each row.",
        )
    return tuple(tokens)
