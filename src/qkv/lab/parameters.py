"""Parameters of requests, checked, since whatever a page sends may be anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.errors import ArgumentError

__all__ = ["MissingError", "Parameters", "StaleError", "TooLongError"]

LONGEST_TEXT = 20_000
"""Characters of a prompt."""

MOST_NUMBERS = 1 << 16
"""Numbers of one array in a request."""


class TooLongError(ArgumentError):
    """A parameter is longer than is allowed."""


class MissingError(ArgumentError):
    """What a request names is not there."""


class StaleError(ArgumentError):
    """A request is about something that is no longer shown."""


class Parameters:
    """The parameters of one request, read by name and kind.

    Examples
    --------
    >>> Parameters({"n": 5}).integer("n", 1, 10)
    5
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def __contains__(self, name: str) -> bool:
        return self._given.get(name) is not None

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """A whole number from `least` to `most`."""
        value = self._given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ArgumentError(
                f"{name}={shown(value)} is not a whole number from {least} to {most}.",
                action="Choose one in this range.",
            )
        return value

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        """One of the words in `choices`."""
        value = self._given.get(name, default)
        if value not in choices:
            raise ArgumentError(
                f"{name}={shown(value)} is not known.", action=f"Use one of {', '.join(choices)}."
            )
        return str(value)

    def text(self, name: str, longest: int = LONGEST_TEXT) -> str | None:
        """A string, or None if there is none."""
        value = self._given.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise ArgumentError(f"{name} is not text.", action="Pass a string.")
        if len(value) > longest:
            raise TooLongError(
                f"{name} has {len(value)} characters; at most {longest} are read.",
                action="Shorten it.",
            )
        return _without_surrogates(value)

    def number(self, name: str) -> float | None:
        """A finite number, or None if there is none."""
        value = self._given.get(name)
        if value is None:
            return None
        try:
            whole = isinstance(value, int | float) and not isinstance(value, bool)
            number = float(value) if whole else np.nan
        except OverflowError:
            number = np.inf
        if not np.isfinite(number):
            raise ArgumentError(f"{name}={shown(value)} is not a number.", action="Pass a number.")
        return number

    def rows(self, name: str, longest: int) -> NDArray[np.float64]:
        """A matrix of finite numbers, given as rows."""
        value = self._given.get(name)
        if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
            raise ArgumentError(f"{name} is not a list of rows.", action="Pass rows of numbers.")
        if len(value) > longest or sum(map(len, value)) > MOST_NUMBERS:
            raise TooLongError(
                f"{name} has {len(value)} rows; at most {longest} are computed one by one.",
                action="Pass fewer rows.",
            )
        numbers = [number for row in value for number in row]
        if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
            raise ArgumentError(f"{name} has entries that are not numbers.", action="Pass numbers.")
        if not value or len(set(map(len, value))) != 1 or not numbers:
            raise ArgumentError(
                f"{name} has rows of different lengths, or none.", action="Pass equal rows."
            )
        try:
            array = np.array(value, np.float64)
        except OverflowError as error:
            raise ArgumentError(
                f"{name} has a number that is too large.", action="Pass numbers below 1e308."
            ) from error
        if not np.isfinite(array).all():
            raise ArgumentError(
                f"{name} has a number that is not finite.", action="Pass finite numbers."
            )
        return array

    def tokens(self, name: str, count: int) -> tuple[str, ...] | None:
        """One string for each of `count` rows, or None if there are none."""
        value = self._given.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(token, str) for token in value):
            raise ArgumentError(f"{name} is not a list of strings.", action="Pass strings.")
        if len(value) != count:
            raise ArgumentError(
                f"{name} has {len(value)} entries for {count} rows.",
                action="Pass one for each row.",
            )
        return tuple(_without_surrogates(token[:200]) for token in value)

    def items(self, name: str, most: int) -> list[Parameters]:
        """A list of objects."""
        value = self._given.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ArgumentError(f"{name} is not a list of objects.", action="Pass objects.")
        if len(value) > most:
            raise TooLongError(f"{name} has {len(value)} entries; at most {most} are read.")
        return [Parameters(item) for item in value]


def _without_surrogates(text: str) -> str:
    """Text that UTF-8 can hold: unpaired surrogates, which JSON allows, become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
