"""Arrays of objects that do not say what they hold, which are no leaves of their call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qkv.arrays import is_array
from qkv.call.binding.flatten import Tree, names_of, undeclared_objects

__all__ = ["arrays_in", "held_arrays"]


def held_arrays(tree: Tree) -> Iterator[tuple[Any, str, Any]]:
    """The arrays of such objects in a structure, after the object and the words for each."""
    for thing in undeclared_objects(tree):
        for words, array in arrays_in(thing, type(thing).__name__):
            yield thing, words, array


def arrays_in(thing: Any, owner: str = "") -> Iterator[tuple[str, Any]]:
    """Arrays among the attributes of an object, with the words for each."""
    waiting: list[tuple[str, Any]] = [(owner, thing)]
    seen: set[int] = set()
    while waiting:
        owner, thing = waiting.pop()
        named: list[tuple[Any, Any]] = [(name, getattr(thing, name)) for name in names_of(thing)]
        if isinstance(thing, dict):
            named += thing.items()
        elif isinstance(thing, list | tuple):
            named += enumerate(thing)
        for name, part in named:
            if is_array(part):
                yield f"{name} of {owner}", part
            elif isinstance(part, dict | list | tuple) and id(part) not in seen:
                seen.add(id(part))
                waiting.append((f"{name} of {owner}", part))
