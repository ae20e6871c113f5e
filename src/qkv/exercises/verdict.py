"""What is said of an answer, and how numbers are compared with the right ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Number, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays import is_array
from qkv.arrays.views import view
from qkv.errors import QkvError

__all__ = ["NotNumbersError", "Numbers", "Verdict", "array_of", "numbers_in"]

Array = NDArray[np.float64]

_NEAR = 0.0051
"""Half a unit of the second decimal, and a little for numbers whose third decimal is 5."""

_CLOSE = 0.01
"""A number that is off by less, relative to the right one, is likely a rounded one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an answer is right, and why.

    Attributes
    ----------
    right : bool
    why : str
        In one or two sentences.
    checked : bool
        False of a text that could not be read, or in which something else was read than is asked
        for: it may be meant as a right answer, so it is not called wrong.

    Examples
    --------
    >>> import qkv
    >>> print(qkv.exercises.check("003.2", 0.0))
    wrong: one number is given; 5 numbers are asked for.
    >>> print(qkv.exercises.check("003.9", "8 tau"))
    not checked: "tau" has no value here; write its number.
    """

    right: bool
    why: str
    checked: bool = True

    def __bool__(self) -> bool:
        return self.right

    def __str__(self) -> str:
        found = "right" if self.right else "wrong" if self.checked else "not checked"
        return f"{found}: {self.why}"


class NotNumbersError(Exception):
    """An answer of another form than was asked for; its text is the reason."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a right answer, and those of usual mistakes.

    Attributes
    ----------
    right : array, or nested lists
    why : str
        What is said to a right answer.
    mistakes : dict of str to array
        Numbers that are wrong, by the reason.
    near : float
        By how much a right number may be off.
    too : dict of str to array
        Other numbers that are right, by what is said to them.
    letters : dict of str to float
        What the letters of the question stand for, so that an answer may be written with them.
    before : sequence of str
        Words or signs that may stand before the number.
    """

    right: Any
    why: str
    mistakes: dict[str, Any]
    near: float = _NEAR
    too: dict[str, Any] = field(default_factory=dict)
    letters: dict[str, float] = field(default_factory=dict)
    before: tuple[str, ...] = ()

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
            close = abs(given - wanted) <= _CLOSE * abs(wanted)
            more = " by less than 1 %; write it with more digits" if close else ""
            return Verdict(False, f"{float(given):g} is too {side}{more}.")
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
        return {
            "right": right,
            "mistakes": listed(self.mistakes),
            "near": self.near,
            "letters": self.letters,
            "before": list(self.before),
        }


def numbers_in(answer: Any, shape: tuple[int, ...]) -> Array:
    """An answer as float64 numbers of a shape, all of them finite."""
    if hasattr(answer, "get_array"):  # An image, as matplotlib's imshow returns it.
        answer = answer.get_array()
    if isinstance(answer, np.ma.MaskedArray):
        answer = np.ma.filled(answer.astype(np.float64), np.nan)
    wanted = f"{_in_words(shape)} asked for."
    try:
        array = array_of(answer)
    except (ValueError, TypeError, RuntimeError, QkvError):
        what = "rows of the answer differ in length"
        if not isinstance(answer, list | tuple):
            what = f"answer is of type {type(answer).__name__}"
        raise NotNumbersError(f"the {what}; {wanted}") from None
    if array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16":
        words = {"b": "yes and no are", "O": "words are", "U": "words are"}.get(
            array.dtype.kind, f"an array of {array.dtype} is"
        )
        raise NotNumbersError(f"{words} given; {wanted}")
    while array.ndim > len(shape) and len(array) == 1:  # Brackets around the whole answer.
        array = array[0]
    if array.shape != shape:
        raise NotNumbersError(f"{_in_words(array.shape)} given; {wanted}")
    numbers = array.astype(np.float64)
    if not np.isfinite(numbers).all():
        first = tuple(int(i) for i in np.argwhere(~np.isfinite(numbers))[0])
        where = f" at {_place(first)}" if first else ""
        raise NotNumbersError(f"the answer has {numbers[first]}{where}; numbers are asked for.")
    return numbers


def array_of(answer: Any) -> NDArray[Any]:
    """An answer as an array: numbers of any exact type, arrays of any library, and lists of both.

    Raises
    ------
    ValueError, TypeError, RuntimeError, QkvError
        If it is neither, or rows differ in length.
    """
    if isinstance(answer, list | tuple):
        array = np.array(
            [array_of(x) if isinstance(x, list | tuple) or is_array(x) else x for x in answer]
        )
    elif isinstance(answer, Number) or (hasattr(answer, "__array__") and not is_array(answer)):
        array = np.asarray(answer)  # A table of pandas, among others.
    else:
        array = view(answer, "answer")
    if array.dtype != object or not all(isinstance(x, Real | Decimal) for x in array.flat):
        return array
    return np.array([_as_float(x) for x in array.flat]).reshape(array.shape)


def _as_float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:  # An integer beyond the largest float.
        return np.inf


def _in_words(shape: tuple[int, ...]) -> str:
    """How many numbers an array of a shape has, as the beginning of a sentence."""
    if not shape:
        return "one number is"
    if len(shape) > 2:
        return f"an array of shape {shape} is"
    counts = [
        f"{count} {unit}{'s' * (count != 1)}"
        for count, unit in zip(shape[::-1], ("number", "row"), strict=False)
    ]
    return f"{' of '.join(counts[::-1])} {'is' if shape[0] == 1 else 'are'}"


def _place(where: tuple[int, ...]) -> str:
    """An index as it is read, from 0 on."""
    if len(where) == 2:
        return f"row {where[0]}, column {where[1]}"
    return f"index {', '.join(map(str, where))}"
