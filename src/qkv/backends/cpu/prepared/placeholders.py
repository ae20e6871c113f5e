"""Problems whose arrays hold one element in the place of all: prepared calls keep none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from qkv.problem.spec import Problem
from qkv.problem.stored_rows import Rows, StoredRows

Array = NDArray[Any]


def tables_of(problem: Problem, arrays: tuple[Array, ...]) -> list[list[str]]:
    """The names of the tables that are views of each array: one name or none.

    An array that was given twice is two tables, in the order of variants.
    """
    origins = dict(problem.operands.origins)
    names_of_arrays = []
    for array in arrays:
        names = [name for name, origin in origins.items() if origin.array is array][:1]
        names_of_arrays.append(names)
        for name in names:
            del origins[name]
    return names_of_arrays


def without_values(problem: Problem, arrays: tuple[Array, ...]) -> tuple[Problem, list[list[str]]]:
    """The problem with placeholders for its operands and for the tables of `arrays`.

    The second result has the names of these tables, for each array.
    """
    operands, read = problem.operands, tables_of(problem, arrays)
    views = {name: placeholder(operands.tables[name]) for names in read for name in names}
    # The caller may change these arrays later, and they are compared by value.
    copies = {name: array.copy() for name, array in operands.tables.items() if name not in views}
    operands = replace(
        operands,
        query=placeholder(operands.query),
        key=_rows_placeholder(operands.key),
        value=_rows_placeholder(operands.value),
        tables={**copies, **views},
        origins={},
    )
    return replace(problem, operands=operands), read


def placeholder(array: Array) -> Array:
    """An array that claims the dtype, shape and strides of another over memory for one element.

    It is there to be described, never read: all but its first element are out of bounds.
    """
    return as_strided(np.empty(1, array.dtype), array.shape, array.strides, writeable=False)


def _rows_placeholder(rows: Rows) -> Rows:
    """The same for keys or values."""
    if not isinstance(rows, StoredRows):
        return placeholder(rows)
    scales, table = (
        None if part is None else placeholder(part) for part in (rows.scales, rows.page_table)
    )
    return StoredRows(placeholder(rows.values), scales, table)
