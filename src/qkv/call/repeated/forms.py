"""The forms of calls: what two calls of one structure must share to be alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Passes
from qkv.call.binding.bound import BoundCall
from qkv.call.binding.flatten import ReadByValue, add_length_keys
from qkv.call.repeated.cache import Entry, Form
from qkv.problem.building.builder import INDEX_LIMIT

__all__ = ["MAX_VALUE_BYTES", "Views", "fixed_form", "form_of", "has_form",
           "heads_first", "in_place", "leaves_of_step", "step_form", "values_of"]  # fmt: skip

Array = NDArray[Any]
Views = tuple[Array, Array, Array]

MAX_VALUE_BYTES = 2**15
"""Largest array, in bytes, that is compared by value; calls with larger ones are always checked."""
_MAX_DECODE_QUERIES = 16
"""The most query rows of a decoding step; a backend may take fewer."""


def heads_first(bound: BoundCall) -> Views | None:
    """Query, key and value with heads before rows, None if they are not plain NumPy arrays."""
    structure = bound.structure
    if len(bound.leaves) < 3:  # What is not an array is no leaf.
        return None
    query, key, value = bound.leaves[:3]
    if not (type(query) is type(key) is type(value) is np.ndarray and structure.is_plain):
        return None
    layout = structure.layout
    if layout == "bhld":
        return query, key, value
    if layout != "blhd" or min(query.ndim, key.ndim, value.ndim) < 3:
        return None
    return query.swapaxes(-3, -2), key.swapaxes(-3, -2), value.swapaxes(-3, -2)


def form_of(bound: BoundCall, views: Views, passes: Passes, entry: Entry | None) -> Form | None:
    """The form of a call; None if calls like it are always checked.

    That of a decoding step leaves the number of keys free, unless the entry says that backends do
    not prepare for that.
    """
    form = step_form(bound, views, passes)
    if form is None or (entry is not None and entry.calls.get(form, form) is None):
        return fixed_form(bound, views, passes)
    return form


def has_form(bound: BoundCall, views: Views, form: Form) -> bool:
    """Whether a call of the same structure has this form."""
    make = step_form if form.any_length else fixed_form
    return make(bound, views, form.passes) == form


def fixed_form(bound: BoundCall, views: Views, passes: Passes, *more: Hashable) -> Form | None:
    """The form in which all sizes and strides are fixed, with `more` layouts."""
    query, key, value = views
    compared = _leaves_of(bound)
    if compared is None:
        return None
    values, arrays = compared
    return Form(
        passes, False, values,
        (
            query.dtype, query.shape, query.strides,
            key.dtype, key.shape, key.strides,
            value.dtype, value.shape, value.strides, *arrays, *more,
        ),
    )  # fmt: skip


def step_form(bound: BoundCall, views: Sequence[Any], passes: Passes) -> Form | None:
    """The form of a decoding step, which any number of keys shares; None of other calls."""
    query, key, value = views
    q_len, kv_len = query.shape[-2:-1], key.shape[-2:-1]
    # With equal lengths the positions need not be given, so such calls are not decoding steps.
    if (
        query.ndim < 3
        or not (0 < q_len[0] <= _MAX_DECODE_QUERIES and q_len != kv_len != (0,))
        or value.shape[:-1] != key.shape[:-1]
        or key.shape[:-3] != query.shape[:-3]
        or key.ndim != query.ndim
    ):
        return None
    structure = bound.structure
    position = structure.options.q_offset
    if not (position is None or type(position) is int or type(position) is str):
        # One number for each batch row, as a cache of sequences of several lengths has them.
        of_rows = position is ReadByValue and structure.lengths
        if not of_rows or type(structure.options.kv_offset) is not int:
            return None
    if type(position) is int and abs(position) > INDEX_LIMIT:
        return None
    length_keys: list[Hashable] = []
    if not all(add_length_keys(tree, kv_len[0], length_keys) for tree in structure.variants):
        return None
    values: tuple[Hashable, ...] = ()
    arrays: list[Hashable] = []
    if len(bound.leaves) > 3:
        if len(structure.lengths) > 1:
            return None
        compared = leaves_of_step(bound, kv_len[0])
        if compared is None:
            return None
        values, arrays = compared
    return Form(
        passes, True, values,
        (
            query.dtype, query.shape, key.dtype, key.shape[:-2], key.shape[-1], value.dtype,
            value.shape[-1], *arrays, *length_keys,
        ),
    )  # fmt: skip


def leaves_of_step(
    bound: BoundCall, kv_len: int
) -> tuple[tuple[Hashable, ...], list[Hashable]] | None:
    """Values and layouts of the arrays of variants in a decoding step.

    Those that are read in place may be as long as there are keys, and have any strides, and those
    that each step has its own of any size.
    """
    structure = bound.structure
    values: list[Hashable] = []
    arrays: list[Hashable] = []
    first, stop = structure.operand_leaves, len(bound.leaves)
    if structure.options.q_offset is ReadByValue:  # The last one; it is read in each step.
        stop -= 1
    for n, array in enumerate(bound.leaves[first:stop], start=first):
        if type(array) is not np.ndarray:
            return None
        if n in structure.lengths:
            arrays.append((array.dtype, array.shape))
        elif n in structure.per_step:
            arrays.append((array.dtype, array.ndim))
        elif n not in structure.by_value:
            sizes = tuple([None if size == kv_len else size for size in array.shape])
            arrays.append((array.dtype, sizes))
        elif array.nbytes <= MAX_VALUE_BYTES:
            values.append((array.dtype, array.shape, array.tobytes()))
        else:
            return None
    return tuple(values), arrays


def values_of(bound: BoundCall) -> tuple[Hashable, ...] | None:
    """The position of the queries, if it is a number, and the arrays that are compared by value.

    None if these are too large, or some array is not one of NumPy.
    """
    compared = _leaves_of(bound)
    return None if compared is None else compared[0]


def _leaves_of(bound: BoundCall) -> tuple[tuple[Hashable, ...], Sequence[Hashable]] | None:
    """The values of a call, and the layouts of its other arrays."""
    structure, leaves = bound
    position = structure.options.q_offset
    if len(leaves) == 3:
        return (position,) if type(position) is int else (), ()
    values: list[Hashable] = [position] if type(position) is int else []
    layouts: list[Hashable] = []
    by_value = structure.by_value
    for n in range(3, len(leaves)):
        array = leaves[n]
        if type(array) is not np.ndarray:
            return None
        if n not in by_value:
            layouts += array.dtype, array.shape, array.strides
        elif array.nbytes > MAX_VALUE_BYTES:
            return None
        else:
            values.append((array.dtype, array.shape, array.tobytes()))
    return tuple(values), layouts


def in_place(bound: BoundCall, is_step: bool = False) -> tuple[Any, ...]:
    """The arrays of variants that are read in place, by a decoding step if it is one."""
    if len(bound.leaves) == 3:
        return ()
    by_value: Any = bound.structure.by_value
    if is_step and bound.structure.per_step:
        by_value = set(by_value).difference(bound.structure.per_step)
    first = bound.structure.operand_leaves
    return tuple([a for n, a in enumerate(bound.leaves[first:], start=first) if n not in by_value])
