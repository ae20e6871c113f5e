"""Variants as data: names and numbers for JSON, and arrays beside them.

What is read back makes objects of the variants of this package alone, from the fields that they
declare; nothing in a file names a function or a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays import is_array
from qkv.arrays.views import view
from qkv.errors import UnsupportedError
from qkv.variants import ALL

__all__ = ["from_data", "to_data"]

Array = NDArray[Any]

_CLASSES = {cls.__name__: cls for cls in ALL if cls.__name__ != "ScoreMod"}
"""Formulas of callers are code, and code is not kept."""

_DEEPEST = 16


def to_data(value: Any, arrays: dict[str, Array], place: str) -> Any:
    """A variant, or what one holds, as JSON data; arrays are put into `arrays` under `place`.

    Raises
    ------
    UnsupportedError
        It is a formula or another function, or an object of another package.

    Examples
    --------
    >>> from qkv.variants import SlidingWindow
    >>> to_data(SlidingWindow(4, 0), {}, "mask")
    {'variant': 'SlidingWindow', 'fields': {'left': 4, 'right': 0}}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else {"float": str(value)}
    if isinstance(value, np.generic):
        return to_data(value.item(), arrays, place)
    if is_array(value):
        arrays[place] = np.array(view(value, "array"))
        return {"array": place}
    if isinstance(value, list | tuple):
        items = [to_data(v, arrays, f"{place}.{i}") for i, v in enumerate(value)]
        return {"list" if isinstance(value, list) else "items": items}
    name = type(value).__name__
    if _CLASSES.get(name) is not type(value) or not is_dataclass(value):
        raise _not_kept(name)
    if any(callable(held) and not is_array(held) for held in vars(value).values()):
        raise _not_kept(f"{name} of a function")
    held = {
        entry.name: to_data(getattr(value, entry.name), arrays, f"{place}.{entry.name}")
        for entry in fields(value)
        if entry.init
    }
    return {"variant": name, "fields": held}


def from_data(data: Any, arrays: Mapping[str, Array], depth: int = 0) -> Any:
    """What `to_data` was given.

    Raises
    ------
    ValueError, TypeError, KeyError
        The data is of another form, or names what is not there.
    """
    if depth > _DEEPEST:
        raise ValueError("variants are nested too deeply")
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if not isinstance(data, dict):
        raise ValueError(f"{type(data).__name__} is not part of a variant")
    if set(data) == {"float"}:
        return float(str(data["float"]))
    if set(data) == {"array"}:
        return arrays[data["array"]]
    if set(data) == {"items"} and isinstance(data["items"], list):
        return tuple(from_data(item, arrays, depth + 1) for item in data["items"])
    if set(data) == {"list"} and isinstance(data["list"], list):
        return [from_data(item, arrays, depth + 1) for item in data["list"]]
    if set(data) == {"variant", "fields"} and isinstance(data["fields"], dict):
        held = {k: from_data(v, arrays, depth + 1) for k, v in data["fields"].items()}
        return _CLASSES[data["variant"]](**held)
    raise ValueError("an entry is not part of a variant")


def _not_kept(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} cannot be kept in a file.",
        [("can be kept", ", ".join(_CLASSES))],
        "Keep the scores without weights: inspect without keep=.",
    )
