"""What the names on a command line choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from qkv.errors import ArgumentError

__all__ = ["named"]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_T = TypeVar("_T", bound=_Named)


def named(known: Sequence[_T], names: Sequence[str], kind: str) -> tuple[_T, ...]:
    """The things of these names, or whose names begin with one that is nobody's whole name.

    Raises
    ------
    ArgumentError
        If no name begins so; it calls what is known by its `kind`.
    """
    for name in names:
        if not any(each.name.startswith(name) for each in known):
            raise ArgumentError(
                f"there is no {kind} {name!r}.",
                [(f"{kind}s", ", ".join(each.name for each in known))],
                "Use one of these, or the beginning of some.",
            )
    exact = {each.name for each in known} & set(names)
    begins = tuple(name for name in names if name not in exact)
    return tuple(each for each in known if each.name in exact or each.name.startswith(begins))
