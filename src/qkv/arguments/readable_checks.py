"""Checks of single arguments that torch's compiler may read, unlike those of `declarations`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.errors import ArgumentError, DTypeError

__all__ = ["array_shape", "as_array", "check_layout", "checked_flag", "is_truth_value"]


def checked_flag(name: str, given: Any) -> bool:
    """A truth value: a bool of Python or NumPy, or an integer.

    Raises
    ------
    ArgumentError
        Naming the argument.
    """
    if isinstance(given, bool | np.bool_ | int):
        return bool(given)
    raise ArgumentError(
        f"{name}={shown(given)} is not True or False.", action=f"Pass {name} as a bool."
    )


def is_truth_value(given: Any) -> bool:
    """Whether this is True or False, or an array of such, where a number is expected."""
    return isinstance(given, bool | np.bool_) or "bool" in str(getattr(given, "dtype", ""))


def check_layout(layout: Any) -> None:
    """Refuse what names no order of heads and length.

    Raises
    ------
    ArgumentError
        It is neither "bhld" nor "blhd".
    """
    if not isinstance(layout, str) or layout not in ("bhld", "blhd"):
        raise ArgumentError(
            f"layout={shown(layout)} is not known.",
            action="Use 'bhld' (batch, heads, length, dim) or 'blhd'.",
        )


def as_array(name: str, given: Any) -> NDArray[Any]:
    """A NumPy array of what may be no array yet, such as a list.

    Raises
    ------
    DTypeError
        Its rows differ in length, or it holds itself.
    """
    try:
        return np.asarray(given)
    except (ValueError, TypeError, RecursionError, OverflowError, RuntimeError) as error:
        raise DTypeError(
            f"{name}={shown(given)} cannot be read as an array of numbers.",
            action=f"Pass {name} as an array, or as a list with rows of one length.",
        ) from error


def array_shape(name: str, given: Any) -> tuple[int, ...]:
    """The shape of an array, or of what may be read as one.

    Raises
    ------
    DTypeError
        It cannot tell one, as torch's nested tensors and parameters that have no shape yet.
    """
    try:
        return tuple((given if hasattr(given, "shape") else as_array(name, given)).shape)
    except RuntimeError as error:
        raise DTypeError(
            f"{name} is a {type(given).__name__} that has no shape of its own.",
            action=f"Pass {name} as a dense array.",
        ) from error
