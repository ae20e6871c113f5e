"""What a mistyped word may have been meant as."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean"]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question with the most similar known word, ending in a space; empty if there is none."""
    like = get_close_matches(word, list(known), 1, cutoff=0.7)
    return f"Did you mean {like[0]}? " if like else ""
