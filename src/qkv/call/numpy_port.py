"""The port of NumPy: a prepared call is told the addresses of arrays, and gets new results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from qkv.arrays.addresses import quick_address_of
from qkv.backends import Prepared

Array = NDArray[Any]

__all__ = ["run_on_arrays"]


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
