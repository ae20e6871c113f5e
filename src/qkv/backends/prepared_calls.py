"""What a backend prepares: a problem made ready, and how it runs for other arrays."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Passes: TypeAlias = Literal["forward", "residuals", "statistics", "gradients"]
"""What is computed: attention, attention that a backward pass follows, attention with statistics of
its rows, gradients."""

LONGEST_STEP = 2**29
"""The largest number of keys, and distance of a position from 0, of a call whose number of keys is
free: differences of positions fit 32 bits."""


class ResultForm(NamedTuple):
    """A result of a prepared call: a dense array, which `new(shape, dtype)` makes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    new: Callable[[tuple[int, ...], np.dtype[Any]], Array] = np.empty


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A problem made ready for other arrays of its form. It keeps no array of the caller's.

    Attributes
    ----------
    run : callable (addresses, keep_alive=(), layouts=(), q_shift=0, in_elements=False,
                    between_products=False) -> bool
        Computes; False if something is not as it was prepared for, or an output is not finite: the
        call is then checked.

        `addresses` are those of query, key and value, of the results, and of the arrays of
        variants, in the order of those that were prepared for; 0 for a result that is not wanted.
        "gradients" reads out, lse, lse_rest, grad_out and grad_lse after value; the last may be 0,
        for zeros. `keep_alive` owns this memory.

        If the number of keys is free, `layouts` has the sizes and the strides, two tuples, of
        query, key, value and each array. Strides are in bytes, or, with `in_elements`, in elements.
        Of keys or values that are `StoredRows`, the address and the strides are those of `values`,
        and the sizes those of `shape`. Behind the arrays follow the `page_table` and the `scales`
        of the key, then those of the value. Sizes and strides of pages, and of their scales, are
        those of kv heads, keys and elements; the stride from page to page is that of what was
        prepared for.
        `q_shift` is added to the row of a query for its position. If queries of batch rows are
        rotated by positions of their own, it is an array of int64 with one for each. Positions that
        arrays of a step state are within `LONGEST_STEP`; `run` does not read them.
        `between_products` says that threads of another library have just worked and will soon
        again, as around the layers of a model.
    results : sequence of ResultForm
        Of out, sinks included, and lse. "residuals" has lse_rest and unrounded too, as
        `run_for_backward` gives them, or neither, or the first alone; "statistics" has the fields
        of `RowStatistics`; "gradients" has those of query, key and value instead.
    brief_keys : int
        Up to so many keys a call needs no thread but the caller's, and stays below some 20
        microseconds, for which it may hold the GIL.
    if_alike : callable (query, key, value, rows, arrays=(), q_shift=None), optional
        Takes arrays of NumPy, and asks by itself whether they are as expected, which saves 6 of 11
        microseconds of a call of one token, and 20 of 32 of a step over 100 keys. Gives new
        results, lse only if `rows`, or None; for "forward" alone. If the number of keys is free,
        queries stand where the problem aligns them, or at `q_shift`. Of `StoredRows` it takes
        `values` and the arrays that `run` has the addresses of; whether the entries of tables are
        pages is for the caller to ask.
    gathered_dtype : dtype, optional
        If it is not None, keys that are `StoredRows` are to be gathered before each call
        (`qkv.problem.stored_rows.whole_rows`), and key and query passed as arrays of this type.
    """

    run: Callable[..., bool]
    results: Sequence[ResultForm]
    brief_keys: int = 0
    if_alike: Callable[..., Any] | None = None
    gathered_dtype: np.dtype[Any] | None = None


def array_at(address: int, form: ResultForm, strides: Sequence[int] | None = None) -> Array:
    """The memory at an address as an array; `strides` in bytes, or dense.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.backends import ResultForm, array_at
    >>> row = np.arange(3.0)
    >>> array_at(row.ctypes.data, ResultForm((3,), row.dtype))[1] = 7
    >>> row
    array([0., 7., 2.])
    """
    return array_reader(form, strides)(address)


def array_reader(form: ResultForm, strides: Sequence[int] | None = None) -> Callable[[int], Array]:
    """`array_at` of any address, made once for many.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.backends import ResultForm, array_reader
    >>> row = np.arange(3.0)
    >>> array_reader(ResultForm((3,), row.dtype), (-8,))(row[2:].ctypes.data)
    array([2., 1., 0.])
    """
    shape, dtype, _ = form
    begin, size = 0, math.prod(shape) * dtype.itemsize
    if strides is not None:
        spans = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
        begin = sum([min(span, 0) for span in spans])
        size = dtype.itemsize + sum(map(abs, spans))
    memory = ctypes.c_char * size

    def read(address: int) -> Array:
        owner: Any = memory.from_address(address + begin)
        return np.ndarray(shape, dtype, owner, -begin, strides)

    return read
