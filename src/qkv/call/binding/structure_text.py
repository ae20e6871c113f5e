"""Structures as JSON, for compilers of other libraries, which take constants as text."""

from __future__ import annotations

import json
import os
import sys
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from qkv.call.binding.flatten import Numbered, ReadByValue, ReadInPlace, Tree, without_arrays
from qkv.call.binding.numbered import hold_object, number_of, numbered
from qkv.errors import ArgumentError
from qkv.problem.language.nodes import from_words
from qkv.variants.base import Expression, Opaque

__all__ = ["dumps", "hold", "is_portable", "keep_for_good", "loads", "names_objects"]


def keep_for_good(thing: Any) -> int:
    """A number for an object that is named as long as the process lives."""
    opaque = Opaque(thing)
    hold(opaque)
    return number_of(opaque)


def hold(tree: Tree) -> None:
    """Keep what the text of a structure names, as long as the process lives."""
    if isinstance(tree, tuple):
        for part in tree:
            hold(part)
    elif isinstance(tree, Opaque):
        hold_object(tree, without_arrays(tree))


def dumps(tree: Tree) -> str:
    """A structure as JSON, with single quotes for double ones.

    Objects that only this process knows are named by number, as long as the structure lives.
    """
    return json.dumps(_encoded(tree), separators=(",", ":")).translate(_FOR_CPP)


def loads(text: str) -> Tree:
    """The structure that `dumps` wrote.

    It is kept for the next call, unless it names objects, whose arrays it would keep alive.
    """
    return _loads(text) if names_objects(text) else _kept(text)


def _loads(text: str) -> Tree:
    return _decoded(json.loads(text.translate(_FOR_CPP)))


_kept = lru_cache(maxsize=1024)(_loads)


_FOR_CPP = str.maketrans("\"\\'|", "'|\"\\")
"""Swaps double quotes with single ones and backslashes with bars, there and back: torch writes the
text into C++ between double quotes, as it is."""


_named: dict[tuple[str, str], type] = {}
"""The classes that texts name, as they were when the last text was written."""

_TYPES: dict[str, type] = {
    "tuple": tuple, "list": list, "float": float, "bool": bool, "object": object,
    "generic": np.generic, "numbered": Numbered, "in place": ReadInPlace, "by value": ReadByValue,
}  # fmt: skip
_TYPE_NAMES = {kind: name for name, kind in _TYPES.items()}


def _encoded(tree: Tree) -> Any:
    """A structure as JSON values: a type is a list that begins with a string, a tuple a list that
    begins with a type."""
    if isinstance(tree, Opaque):
        words = tree.in_words()
        return (
            {"object": number_of(tree), "of": _PROCESS} if words is None else {"expression": words}
        )
    if type(tree) is tuple and tree[0] is Numbered:
        return {"whole": tree[1], "of": _PROCESS}
    if isinstance(tree, type):
        if tree in _TYPE_NAMES:
            return [_TYPE_NAMES[tree]]
        if _is_local(tree):
            return {"class": keep_for_good(tree), "of": _PROCESS}
        name = tree.__module__, tree.__qualname__
        if _named.setdefault(name, tree) is not tree:  # Its module was loaded again.
            _named[name] = tree
            _kept.cache_clear()
        return [*name]
    if isinstance(tree, bytes):
        return {"bytes": tree.hex()}
    return [_encoded(part) for part in tree] if type(tree) is tuple else tree


def is_portable(tree: Tree) -> bool:
    """Whether another process understands the text of a structure."""
    if type(tree) is tuple:
        return tree[0] is not Numbered and all(map(is_portable, tree))
    if isinstance(tree, type):
        return not _is_local(tree)
    return not isinstance(tree, Opaque) or tree.in_words() is not None


def names_objects(text: str) -> bool:
    """Whether the text of a structure names objects of this process."""
    return f"'of':'{_PROCESS}'" in text


_PROCESS = os.urandom(8).hex()
"""Tells this process from others, which know other objects by its numbers."""


def _decoded(data: Any) -> Tree:
    if isinstance(data, dict):
        if data.get("of", _PROCESS) != _PROCESS:
            raise ArgumentError(
                "this was compiled or exported in another process, with a variant of its own that "
                "only that process knows.",
                action="Make it here again; a ScoreMod of operators and functions, whose arrays "
                "are tensors, can be saved, and so can a variant whose class is a dataclass of an "
                "importable module.",
            )
        if "object" in data:
            return numbered(data["object"])
        if "whole" in data:
            return Numbered, data["whole"]
        if "class" in data:
            return numbered(data["class"]).thing
        if "expression" in data:
            return Expression(from_words(data["expression"]))
        return bytes.fromhex(data["bytes"])
    if not isinstance(data, list):
        return data
    if not isinstance(data[0], str):
        return tuple(map(_decoded, data))
    if len(data) == 1:
        return _TYPES[data[0]]
    import_module(data[0])
    return _found(*data)


def _is_local(kind: type) -> bool:
    """Whether a class cannot be found again by its name, in this process or in another."""
    return kind.__module__ == "__main__" or _found(kind.__module__, kind.__qualname__) is not kind


def _found(module: str, name: str) -> Any:
    """What a module that was imported has under a name with dots, None if there is nothing."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
