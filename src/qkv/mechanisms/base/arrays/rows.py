"""Arrays that mechanisms are given, declared by annotations; see `qkv.arguments.declarations`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from qkv.arguments.array_errors import no_array_error
from qkv.arrays import kind_of, library_of
from qkv.errors import ArgumentError, DTypeError, ShapeError

__all__ = ["MOST_RANDOM", "Arrays", "Rows", "refuse_many_numbers"]

_TYPES = ("float64", "float32", "float16", "bfloat16")

MOST_RANDOM = 2**28
"""How many random numbers a mechanism draws, which are 2 GiB; larger weights are to be given."""


def refuse_many_numbers(what: str, numbers: int) -> None:
    """Refuse to draw more than `MOST_RANDOM` random numbers.

    Raises
    ------
    ArgumentError
        With how many there would be.
    """
    if numbers > MOST_RANDOM:
        raise ArgumentError(
            f"{what} would be {numbers} random numbers; at most {MOST_RANDOM} are drawn.",
            action="Choose smaller sizes, or pass the arrays.",
        )


def _rows(name: str, given: Any) -> Any:
    """An array (..., n, width) of a floating type."""
    given = _array(name, given)
    if given.ndim < 2:
        raise ShapeError(
            f"{name} has shape {tuple(given.shape)}, not (..., n, width).",
            action="Pass one sequence of rows or more.",
        )
    if _type_of(given) not in _TYPES:
        raise DTypeError(
            f"{name} has dtype {given.dtype}; mechanisms take the floating types "
            f"{', '.join(_TYPES)}, in the machine's byte order.",
            action="Convert it, to float32 for example.",
        )
    return given


def _array(name: str, given: Any) -> Any:
    """A dense array of a library that qkv knows, without what a subclass of NumPy's changes."""
    kind = kind_of(given)
    if kind is None or not hasattr(given, "ndim") or not hasattr(given, "dtype"):
        raise no_array_error(given, name)
    if kind == "numpy" and type(given).__name__ != "ndarray":
        return library_of(given, name).view(given, name)  # Refuses masked arrays.
    if kind == "torch":
        from qkv.arrays.torch_arrays import check_dense

        check_dense(given, name)
    return given


def _type_of(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def _arrays(name: str, given: Any) -> Mapping[str, Any]:
    """A mapping of strings to arrays of numbers."""
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ArgumentError(
            f"{name} is not a mapping of names to arrays, but a {type(given).__qualname__}.",
            action=f"Pass {name} as a dict of str to array.",
        )
    arrays = {key: _array(key, array) for key, array in given.items()}
    for key, array in arrays.items():
        kind = _type_of(array)
        if not kind.startswith(("float", "bfloat", "int", "uint")):
            raise DTypeError(
                f"{key} has dtype {kind}, which holds no real numbers.",
                action="Convert it, to float32 for example.",
            )
    return arrays


Rows: TypeAlias = Annotated[Any, _rows]
"""An array (..., n, width) of a floating type."""
Arrays: TypeAlias = Annotated[Mapping[str, Any], _arrays]
"""Arrays of numbers by name."""
