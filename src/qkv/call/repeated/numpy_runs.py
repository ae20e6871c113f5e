"""Run prepared calls on NumPy arrays: they take addresses, and results are new arrays."""

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
    arrays: Sequence[Array],
    *,
    rows: bool = True,
    q_shift: int | Array | None = None,
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
    q_shift : int or array, optional
        The position of the first query, or one for each batch row, if the number of keys is free.

    Returns
    -------
    list of array, or None
        None if something is not as it was prepared for, or an output is not finite.
    """
    known = read if read[-1] is not None else read[:-1]
    addresses = [*map(quick_address_of, known), *[0] * (len(read) - len(known))]
    layouts: list[Any] = []
    if q_shift is not None:
        for array in (*read, *arrays):
            layouts += array.shape, array.strides
    step = () if q_shift is None else (layouts, q_shift)
    return _run(
        prepared, addresses, list(map(quick_address_of, arrays)), rows, (read, arrays), step
    )


def run_on_stored_rows(
    prepared: Prepared,
    read: Sequence[Rows],
    arrays: Sequence[Array],
    *,
    rows: bool,
    q_shift: int | Array,
) -> list[Any] | None:
    """The same for a decoding step whose keys or values are `StoredRows`."""
    operands, parts = [], [_Passed(array, array.shape, array.strides) for array in arrays]
    for each in read:
        operand, own_parts = _taken_apart(each)
        operands.append(operand)
        parts += own_parts
    layouts: list[Any] = []
    for passed in (*operands, *parts):
        layouts += passed.sizes, passed.strides
    addresses, more = (
        [quick_address_of(passed.array) for passed in each] for each in (operands, parts)
    )
    return _run(prepared, addresses, more, rows, (read, arrays), (layouts, q_shift))


def _run(
    prepared: Prepared,
    read: Sequence[int],
    arrays: Sequence[int],
    rows: bool,
    keep_alive: object,
    step: tuple[Any, ...],
) -> list[Any] | None:
    """Run at these addresses, with new results; `step` has the further arguments of a step."""
    results: list[Any] = [new(shape, dtype) for shape, dtype, new in prepared.results]
    of_results = list(map(quick_address_of, results))
    if not rows:
        results[1], of_results[1] = None, 0
    addresses = [*read, *of_results, *arrays]
    return results if prepared.run(addresses, (keep_alive, results), *step) else None


class _Passed(NamedTuple):
    """An array, and the sizes and strides with which it is passed to a prepared call."""

    array: Array
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def _taken_apart(rows: Rows) -> tuple[_Passed, list[_Passed]]:
    """Keys or values, and their table and scales, as they are passed to `Prepared.run`."""
    if not isinstance(rows, StoredRows):
        return _Passed(rows, rows.shape, rows.strides), []
    values, table, scales = rows.values, rows.page_table, rows.scales
    if table is None:
        parts = [] if scales is None else [_Passed(scales, scales.shape, scales.strides)]
        return _Passed(values, rows.shape, values.strides), parts
    # Batch rows differ in their tables alone.
    sizes, parts = rows.shape[-3:], [_Passed(table, table.shape, table.strides)]
    if scales is not None:
        parts.append(_Passed(scales, sizes[:-1], scales.strides[1:]))
    return _Passed(values, sizes, values.strides[1:]), parts
