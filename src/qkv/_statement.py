"""What a call says besides query, key and value: a text without arrays, and the arrays.

A compiler of another library holds the text as a constant and the arrays as inputs, and may run
both much later. The text is a Python literal. Objects that it cannot spell (a user's own variant,
the function of a score mod) it names by number; whoever keeps the text keeps them alive.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from qkv.errors import ArgumentError
from qkv.variants import ScoreMod

__all__ = ["Restated", "Statement", "hold", "keep_for_good", "keywords_of", "restate", "state"]

_OWN = "qkv.variants."


@dataclass(frozen=True, slots=True)
class Statement:
    """A call without its arrays, those arrays, and what must live as long as the text is used."""

    text: str
    arrays: list[Any]
    named: list[Any]


@dataclass(frozen=True, slots=True)
class Restated:
    """A call's variants and keywords again.

    `arrays` are those that were put in, `owners` has for each the variant that holds it, None for
    an offset.
    """

    variants: tuple[Any, ...]
    keywords: dict[str, Any]
    arrays: tuple[Any, ...]
    owners: tuple[Any, ...]


class _Named:
    """An object under a number, as long as somebody holds this."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        self.number = next(_numbers)
        _known[self.number] = self


_numbers = count()
_known: WeakValueDictionary[int, _Named] = WeakValueDictionary()


def keep_for_good(thing: Any) -> int:
    """A number for an object that is named as long as the process lives."""
    _kept.append(_Named(thing))
    return _kept[-1].number


def hold(named: Sequence[Any]) -> None:
    """Keep what a statement names, as long as the process lives."""
    _kept.extend(named)


_kept: list[_Named] = []


class _Gap:
    """Where the function of a score mod had an array."""

    def __init__(self, number: int) -> None:
        self.number = number


def state(
    variants: Sequence[Any],
    is_array: Callable[[Any], bool],
    keep: Callable[[Any], int] | None = None,
    **keywords: Any,
) -> Statement:
    """Take a call apart; with `keep`, usually `keep_for_good`, objects stay whole."""
    parts = _Parts(is_array, keep)
    said = "".join([parts.spell(variant) + ", " for variant in variants])
    named = "".join([f"{name!r}: {parts.spell(value)}, " for name, value in keywords.items()])
    return Statement(f"(({said}), {{{named}}})", parts.arrays, parts.named)


class _Parts:
    """What has been found in a call so far."""

    def __init__(self, is_array: Callable[[Any], bool], keep: Callable[[Any], int] | None) -> None:
        self.is_array = is_array
        self.keep = keep
        self.arrays: list[Any] = []
        self.named: list[_Named] = []

    def spell(self, value: Any) -> str:
        """A literal for a value; anything that is no constant becomes a tuple that says what."""
        if value is None or isinstance(value, bool | str):
            return repr(value)
        if self.is_array(value):
            return f"('array', {self._number(value)})"
        if isinstance(value, int):
            return f"{int(value)}"
        if isinstance(value, float):
            return f"('float', {float(value).hex()!r})"
        if isinstance(value, list | tuple):
            return f"('sequence', {''.join([self.spell(entry) + ', ' for entry in value])})"
        if isinstance(value, ScoreMod) and self.keep is None:
            return f"('score mod', {self._name(value.with_arrays(self._gap))})"
        kind = type(value)
        spelled = kind.__module__.startswith(_OWN) and is_dataclass(value)
        if spelled and not isinstance(value, ScoreMod):
            said = "".join([self.spell(getattr(value, f.name)) + ", " for f in fields(value)])
            return f"('variant', {kind.__module__!r}, {kind.__name__!r}, {said})"
        return f"('object', {self._name(value)})"

    def _number(self, array: Any) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1

    def _gap(self, value: Any) -> Any:
        return _Gap(self._number(value)) if self.is_array(value) else value

    def _name(self, thing: Any) -> int:
        if self.keep is not None:
            return self.keep(thing)
        self.named.append(_Named(thing))
        return self.named[-1].number


def restate(text: str, arrays: Sequence[Any]) -> Restated:
    """Put a call together again, with arrays in the places of those that were taken out."""
    said, keywords = _read(text)
    owners: list[Any] = [None] * len(arrays)

    def make(tree: Any, seen: list[int]) -> Any:
        match tree:
            case ("array", number):
                seen.append(number)
                return arrays[number]
            case ("float", digits):
                return float.fromhex(digits)
            case ("sequence", *entries):
                return tuple(make(entry, seen) for entry in entries)
            case ("variant", module, name, *values):
                return getattr(sys.modules[module], name)(*(make(v, seen) for v in values))
            case ("object", number):
                return _thing(number)
            case ("score mod", number):

                def fill(value: Any) -> Any:
                    return make(("array", value.number), seen) if isinstance(value, _Gap) else value

                return _thing(number).with_arrays(fill)
        return tree

    variants = []
    for tree in said:
        seen: list[int] = []
        variants.append(make(tree, seen))
        for number in seen:
            owners[number] = variants[-1]
    made = {name: make(tree, []) for name, tree in keywords.items()}
    return Restated(tuple(variants), made, tuple(arrays), tuple(owners))


def keywords_of(text: str) -> dict[str, Any]:
    """The keywords of a call, without arrays in them."""
    return _read(text)[1]


@lru_cache(maxsize=1024)
def _read(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    said, keywords = ast.literal_eval(text)
    return said, keywords


def _thing(number: int) -> Any:
    found = _known.get(number)
    if found is None:
        raise ArgumentError(
            f"a variant of this call is gone (number {number}).",
            action="Keep variants of your own, and score mods, as long as what was compiled from "
            "them; they cannot be saved with it.",
        )
    return found.thing
