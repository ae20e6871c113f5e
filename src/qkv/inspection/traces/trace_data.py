"""Dataclasses of numbers out of the plain lists, numbers and strings that `json_data` made."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from qkv.files.json_numbers import numbers_of_json

__all__ = ["built", "read_only"]

T = TypeVar("T")

_DTYPES: dict[str, Any] = {"allowed": np.bool_, "kv_pos": np.int64}
"""Types of arrays by the name of their field; all others are float64."""


def read_only(value: Any) -> None:
    """Let nobody write to the arrays of dataclasses, some of which are parts of one."""
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    elif is_dataclass(value):
        for f in fields(value):
            read_only(getattr(value, f.name))
    elif isinstance(value, tuple):
        for item in value:
            read_only(item)


def built(kind: type[T], value: Any) -> T:
    """The dataclass that `json_data` was given.

    Raises
    ------
    ValueError
        A field is missing, unknown, or of another type; the message names it.
    """
    instance: T = _built(kind, value, kind.__name__)
    return instance


def _built(kind: Any, value: Any, name: str) -> Any:
    kind = getattr(get_origin(kind), "__value__", kind)  # NDArray is an alias from NumPy 2.5 on.
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        (rest,) = (part for part in parts if part is not NoneType)
        return None if value is None else _built(rest, value, name)
    if origin is tuple:
        return tuple(_built(parts[0], item, name) for item in _list(value, name))
    if origin is dict:
        items = _fields(value, name).items()
        return {str(key): _built(parts[1], item, name) for key, item in items}
    if origin is np.ndarray:
        return _array(value, name)
    if is_dataclass(kind):
        return _dataclass(kind, _fields(value, name), name)
    if kind is float:
        value = float(value) if isinstance(value, int) else numbers_of_json(value)
    if type(value) is not kind:
        raise ValueError(f"{name} is not of type {kind.__name__}")
    return value


def _dataclass(kind: Any, given: dict[str, Any], name: str) -> Any:
    types = _types(kind)
    for wrong in sorted(types.keys() ^ given.keys()):
        raise ValueError(f"{name} {'lacks' if wrong in types else 'has an unknown'} {wrong:.40}")
    return kind(**{key: _built(types[key], given[key], key) for key in types})


@cache
def _types(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _array(value: Any, name: str) -> Any:
    dtype = _DTYPES.get(name, np.float64)
    try:
        array = np.asarray(numbers_of_json(value) if dtype is np.float64 else value)
    except ValueError:
        raise ValueError(f"the rows of {name} differ in length") from None
    right = {"b": (np.bool_,), "i": (np.int64, np.float64), "f": (np.float64,)}
    if array.size and dtype not in right.get(array.dtype.kind, ()):
        raise ValueError(f"{name} holds something else than {np.dtype(dtype)}")
    # A single number stays one, and no array of no dimensions.
    return array.astype(dtype)[()]


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    return value


def _fields(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    return value
