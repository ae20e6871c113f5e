"""Counts in words."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

__all__ = ["counted", "words_of_tokens"]


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number and what it counts; `nouns` where the plural has more than an s.

    Examples
    --------
    >>> counted(1, "token"), counted(30, "token")
    ('1 token', '30 tokens')
    """
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


def words_of_tokens(tokens: NDArray[Any] | None) -> str:
    """How many tokens (batch, length) there are, as far as that is known."""
    return "tokens unknown" if tokens is None else counted(tokens.shape[-1], "token")
