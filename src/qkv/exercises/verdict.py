"""What is said of an answer, and how numbers are compared with the right ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.views import view
from qkv.errors import QkvError

__all__ = ["NotNumbersError", "Numbers", "Verdict", "numbers_in"]

Array = NDArray[np.float64]

_NEAR = 0.0051
"""Half a unit of the second decimal, and a little for numbers whose third decimal is 5."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an answer is right, and why.

    Attributes
    ----------
    right : bool
    why : str
        In one or two sentences.

    Examples
    --------
    >>> import qkv
    >>> print(qkv.exercises.check("003.2", 0.0))
    wrong: the answer has shape (); (5,) is asked for.
    """

    right: bool
    why: str

    def __bool__(self) -> bool:
        return self.right

    def __str__(self) -> str:
        return f"{'right' if self.right else 'wrong'}: {self.why}"


class NotNumbersError(Exception):
    """An answer of another form than was asked for; its text is the reason."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a right answer, and those of usual mistakes.

    Attributes
    ----------
    right : array, or nested lists
    why : str
        What a right answer is told.
    mistakes : dict of str to array
        Numbers that are wrong, by the reason.
    near : float
        By how much a right number may be off.
    too : dict of str to array
        Other numbers that are right, by what they are told.
    """

    right: Any
    why: str
    mistakes: dict[str, Any]
    near: float = _NEAR
    too: dict[str, Any] = field(default_factory=dict)

    def check(self, answer: Any) -> Verdict:
        """Right if all numbers are near; else a usual mistake, or what is furthest off."""
        wanted = np.asarray(self.right, np.float64)
        given = numbers_in(answer, wanted.shape)
        for why, right in {self.why: wanted, **self.too}.items():
            if np.abs(given - right).max() <= self.near:
                return Verdict(True, why)
        for reason, wrong in self.mistakes.items():
            if np.abs(given - np.asarray(wrong)).max() <= self.near:
                return Verdict(False, reason)
        if wanted.ndim == 0:
            side = "small" if given < wanted else "large"
            return Verdict(False, f"{float(given):g} is too {side}.")
        off = np.abs(given - wanted)
        where = tuple(int(i) for i in np.unravel_index(int(off.argmax()), off.shape))
        count, place = int((off > self.near).sum()), _place(where)
        return Verdict(
            False,
            f"{count} of {off.size} numbers are off; "
            f"the furthest is {given[where]:.4g} at {place}.",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, for a page that checks answers itself."""

        def listed(numbers: dict[str, Any]) -> list[dict[str, Any]]:
            return [
                {"why": why, "numbers": np.asarray(some, np.float64).tolist()}
                for why, some in numbers.items()
            ]

        right = listed({self.why: self.right, **self.too})
        return {"right": right, "mistakes": listed(self.mistakes), "near": self.near}


def numbers_in(answer: Any, shape: tuple[int, ...]) -> Array:
    """An answer as float64 numbers of a shape, all of them finite."""
    if hasattr(answer, "get_array"):  # An image, as matplotlib's imshow returns it.
        answer = np.ma.filled(answer.get_array().astype(np.float64), np.nan)
    if isinstance(answer, bool | np.bool_):
        raise NotNumbersError("the answer is True or False; pass numbers.")
    plain = isinstance(answer, list | tuple | int | float | np.generic)
    try:
        array = np.asarray(answer) if plain else view(answer, "answer")
    except (ValueError, TypeError, RuntimeError, QkvError):
        raise NotNumbersError(
            f"the answer is no array of numbers of shape {shape}; it is of type "
            f"{type(answer).__name__}, or its rows differ in length."
        ) from None
    if array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16":
        raise NotNumbersError(f"the answer holds {array.dtype}, not numbers.")
    if array.shape != shape:
        raise NotNumbersError(f"the answer has shape {array.shape}; {shape} is asked for.")
    numbers = array.astype(np.float64)
    if not np.isfinite(numbers).all():
        first = tuple(int(i) for i in np.argwhere(~np.isfinite(numbers))[0])
        where = f" at {_place(first)}" if first else ""
        raise NotNumbersError(f"the answer has {numbers[first]}{where}; numbers are asked for.")
    return numbers


def _place(where: tuple[int, ...]) -> str:
    """An index as it is read, from 0 on."""
    if len(where) == 2:
        return f"row {where[0]}, column {where[1]}"
    return f"index {', '.join(map(str, where))}"
