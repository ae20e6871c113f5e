"""Which layers of a model are kept, so that their weights can be read after it has run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from qkv.arguments.declarations import is_integer, shown
from qkv.errors import ArgumentError

__all__ = ["Keep", "require_keep"]

Keep = Literal["weights"] | Collection[int] | None
"""All, those with these numbers, or none."""


def require_keep(keep: Any) -> None:
    """Refuse what `keep` may not be.

    Raises
    ------
    ArgumentError
        It is no `Keep`, or has a number below 0: which layer that is is known too late.
    """
    if keep is None or (isinstance(keep, str) and keep == "weights"):
        return
    try:
        numbers: list[Any] = list(keep) if isinstance(keep, Collection) else [None]
    except TypeError:  # An array of no dimension.
        numbers = [None]
    if isinstance(keep, str) or not all(map(is_integer, numbers)):
        raise ArgumentError(
            f"keep={shown(keep)} is not known.",
            action='Pass "weights" for all layers, or the numbers of some, from 0.',
        )
    if min(numbers, default=0) < 0:
        raise ArgumentError(
            f"keep={shown(keep)} counts from the last layer, and which one is the last is known "
            "only when all have run.",
            action="Pass numbers from 0, such as keep=[11] for the last of 12 layers, or "
            'keep="weights" for all.',
        )
