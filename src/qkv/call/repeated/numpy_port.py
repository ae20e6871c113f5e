"""The port of NumPy: a prepared call is told the addresses of arrays, and gets new results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from qkv.arrays.addresses import quick_address_of
from qkv.backends import Prepared
from qkv.problem.stored_rows import Rows, StoredRows

Array = NDArray[Any]

__all__ = ["run_on_arrays", "run_on_stored_rows"]


def run_on_arrays(
    prepared: Prepared,
    read: Sequence[Any],
    arrays: Sequence[Array] = (),
    *,
    rows: bool = True,
    q_shift: int | None = None,
) -> list[Any] | None:
    """The results of a prepared call of arrays of its form.

    Parameters
    ----------
    prepared : Prepared
    read : sequence of array
        Query, key and value with heads before rows, and what else the passes read;
        the last may be None, for zeros.
    arrays : sequence of array
        Those of variants.
    rows : bool
        Whether lse is wanted; it is None otherwise.
    q_shift : int, optional
        The position of the first query, if the number of keys is free.

    Returns
    -------
    list of array, or None
        None if something is not as it was prepared for, or an output is not finite.
    """
    at = quick_address_of
    results: list[Any] = [new(shape, dtype) for shape, dtype, new in prepared.results]
    known = read if read[-1] is not None else read[:-1]
    addresses = [*map(at, known), *[0] * (len(read) - len(known))]
    addresses += [*map(at, results), *map(at, arrays)]
    if not rows:
        results[1], addresses[len(read) + 1] = None, 0
    held = read, results, arrays
    if q_shift is None:
        return results if prepared.run(addresses, held) else None
    layouts: list[Any] = []
    for array in (*read, *arrays):
        layouts += array.shape, array.strides
    return results if prepared.run(addresses, held, layouts, q_shift) else None


def run_on_stored_rows(
    prepared: Prepared,
    read: Sequence[Rows],
    arrays: Sequence[Array],
    *,
    rows: bool,
    q_shift: int,
) -> list[Any] | None:
    """The same for a decoding step whose keys or values are `StoredRows`."""
    at = quick_address_of
    results: list[Any] = [new(shape, dtype) for shape, dtype, new in prepared.results]
    taken = [_taken_apart(each) for each in read]
    more = [_Told(array, array.shape, array.strides) for array in arrays]
    for _, parts in taken:
        more += parts
    told = [of_operand for of_operand, _ in taken]
    addresses = [at(each.array) for each in told]
    addresses += [*map(at, results), *[at(each.array) for each in more]]
    if not rows:
        results[1], addresses[len(read) + 1] = None, 0
    layouts: list[Any] = []
    for each in (*told, *more):
        layouts += each.sizes, each.strides
    held = read, results, arrays
    return results if prepared.run(addresses, held, layouts, q_shift) else None


class _Told(NamedTuple):
    """An array, and the sizes and strides that a prepared call is told of it."""

    array: Array
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def _taken_apart(rows: Rows) -> tuple[_Told, list[_Told]]:
    """What `Prepared.run` is told of keys or values, and of their table and scales."""
    if not isinstance(rows, StoredRows):
        return _Told(rows, rows.shape, rows.strides), []
    values, table, scales = rows.values, rows.page_table, rows.scales
    strides, parts = values.strides, []
    if table is not None:
        # Batch rows differ in their tables alone.
        strides = (*(0,) * (rows.ndim - 3), *strides[1:])
        parts.append(_Told(table, table.shape, table.strides))
    if scales is not None and table is not None:
        parts.append(_Told(scales, (), ()))
    elif scales is not None:
        parts.append(_Told(scales, scales.shape, scales.strides))
    return _Told(values, rows.shape, strides), parts
