"""Parameters of requests, checked, since whatever a page sends may be anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkv.arguments.declarations import is_integer, shown
from qkv.errors import ArgumentError

__all__ = ["MissingError", "Parameters", "StaleError", "TooLongError"]

LONGEST_TEXT = 20_000
"""Characters of a prompt."""


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

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """A whole number from `least` to `most`."""
        value = self._given.get(name, default)
        if not is_integer(value) or not least <= value <= most:
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
