"""The cache keys of prepared calls: what two calls must share to be alike."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import generation
from qkv.call.bound import BoundCall
from qkv.call.cache import Key

__all__ = ["MAX_VALUE_BYTES", "call_key", "heads_first", "in_place", "leaf_keys"]

Array = NDArray[Any]

MAX_VALUE_BYTES = 2**15
"""Largest array, in bytes, that is compared by value; calls with larger ones are always checked."""


def heads_first(bound: BoundCall) -> tuple[Array, Array, Array] | None:
    """Query, key and value with heads before rows, None if they are not plain NumPy arrays."""
    structure = bound.structure
    query, key, value = bound.leaves[:3]
    if not (type(query) is type(key) is type(value) is np.ndarray and structure.is_plain):
        return None
    if structure.options[1] == "bhld":
        return query, key, value
    if structure.options[1] != "blhd" or min(query.ndim, key.ndim, value.ndim) < 3:
        return None
    return query.swapaxes(-3, -2), key.swapaxes(-3, -2), value.swapaxes(-3, -2)


def call_key(bound: BoundCall, views: tuple[Array, Array, Array], purpose: str) -> Key | None:
    """The cache key of a call, which repeated calls share; None if it cannot be prepared."""
    structure, leaves = bound
    query, key, value = views
    scale, _, *other_options = structure.options
    if len(leaves) == 3:
        of_leaves: Any = ()
    else:
        of_leaves = leaf_keys(bound)
        if of_leaves is None:
            return None
    return (
        purpose, generation(), structure.variants, scale, *other_options, structure.by_value,
        query.dtype, query.shape, query.strides,
        key.dtype, key.shape, key.strides,
        value.dtype, value.shape, value.strides,
        *of_leaves,
    )  # fmt: skip


def leaf_keys(bound: BoundCall, kv_len: int | None = None) -> list[Hashable] | None:
    """The part of a cache key for the arrays of variants and options.

    With `kv_len` the call is a decoding step: arrays that are read in place may be as long as there
    are keys, and have any strides, and those that each step has its own of any size.
    """
    by_value = bound.structure.by_value
    keys: list[Hashable] = []
    is_step = kv_len is not None
    lengths = bound.structure.lengths if is_step else ()
    per_step = bound.structure.per_step if is_step else ()
    for n, array in enumerate(bound.leaves[3:], start=3):
        if type(array) is not np.ndarray:
            return None
        if n in lengths:
            keys.append((array.dtype, array.shape))
        elif n in per_step:
            keys.append((array.dtype, array.ndim))
        elif n not in by_value:
            sizes: Hashable = array.shape, array.strides
            if is_step:
                sizes = tuple([None if size == kv_len else size for size in array.shape])
            keys.append((array.dtype, sizes))
        elif array.nbytes <= MAX_VALUE_BYTES:
            keys.append((array.dtype, array.shape, array.tobytes()))
        else:
            return None
    return keys


def in_place(bound: BoundCall, is_step: bool = False) -> tuple[Any, ...]:
    """The arrays of variants that are read in place, by a decoding step if it is one."""
    if len(bound.leaves) == 3:
        return ()
    by_value: Any = bound.structure.by_value
    if is_step and bound.structure.per_step:
        by_value = set(by_value).difference(bound.structure.per_step)
    return tuple([a for n, a in enumerate(bound.leaves[3:], start=3) if n not in by_value])
