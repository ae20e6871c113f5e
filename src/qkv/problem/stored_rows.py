"""Keys and values as caches hold them: in pages, as int8 with scales, or both.

`Paged` and `Quantized` are what callers pass; `StoredRows` is what a problem holds, checked, and
read row by row: row j of a batch row and kv head is

    values[..., j, :] * scales[..., j] + offset
    pages[page_table[..., j // page_size], head, j % page_size, :]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ArgumentError, DTypeError, ShapeError

Array = NDArray[Any]

__all__ = [
    "Paged",
    "Quantized",
    "Rows",
    "Storage",
    "StoredRows",
    "plain",
    "read_rows",
    "scores_of_offset",
    "whole_rows",
]


@dataclass(frozen=True, eq=False)
class Quantized:
    """Keys or values as int8 with one scale for each token and kv head, `values * scales + offset`.

    Parameters
    ----------
    values : int8 array (..., num_kv_heads, kv_len, dim)
        In the layout of the call, as any key or value.
    scales : float32 array (..., num_kv_heads, kv_len)
        Without the last dimension of `values`; each multiplies one row.
    offset : float32 array (num_kv_heads, dim), optional
        For keys alone: added to every row of a kv head; 0 unless given. Caches keep the mean of
        keys here, since a bias of the key projection (Qwen 2) would widen every step of `values`.

    Notes
    -----
    The kernel for few queries reads one byte for each number; a key's scale multiplies its
    scores, a value's its weights. Elsewhere rows are widened as they are read. The offset of keys
    adds `scale * query . offset` to all scores of a query, which is computed once for each query.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> key = qkv.Quantized(np.array([[[3, -4]]], np.int8), np.array([[0.5]], np.float32))
    >>> query = np.ones((1, 1, 2), np.float32)
    >>> qkv.attention(query, key, key)
    array([[[ 1.5, -2. ]]], dtype=float32)
    """

    values: Any
    scales: Any
    offset: Any = None

    @property
    def ndim(self) -> int:
        """Dimensions of `values`."""
        return int(self.values.ndim)


@dataclass(frozen=True, eq=False)
class Paged:
    """Keys or values in pages, of which each batch row has a list, `pages[page_table]`.

    Parameters
    ----------
    pages : array (num_pages, num_kv_heads, page_size, dim), or Quantized of that shape
        In the layout of the call, a page in place of a batch row: with `layout="blhd"` pages are
        (num_pages, page_size, num_kv_heads, dim). Pages of the other order are
        `pages.swapaxes(1, 2)`, which copies nothing.
    page_table : integer array (..., pages_per_slot)
        Row j of the keys lies in page `page_table[..., j // page_size]`, row `j % page_size`;
        kv_len is `pages_per_slot * page_size`. Say with `KeyLengths` how many rows are real:
        entries behind them are not read and may hold anything.

    Notes
    -----
    The kernel for few queries reads pages where they lie; others gather them first, as
    `qkv.plan` says. A page may be shared by any number of batch rows.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> pages = np.arange(12.0).reshape(3, 1, 2, 2)  # 3 pages of 2 rows
    >>> key = qkv.Paged(pages, np.array([[2, 0]]))
    >>> query = np.zeros((1, 1, 1, 2))
    >>> qkv.attention(query, key, key, qkv.KeyLengths(3))
    array([[[[6., 7.]]]])
    """

    pages: Any
    page_table: Any

    @property
    def ndim(self) -> int:
        """Dimensions of the keys or values that it stands for."""
        return int(self.page_table.ndim) + 2


@dataclass(frozen=True, slots=True)
class Storage:
    """How a stored operand lies: what generated code depends on."""

    dtype: str
    paged: bool

    def __str__(self) -> str:
        return f"{'pages of ' if self.paged else ''}{self.dtype}"


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows that are not plain arrays: `shape` is that of the array they stand for.

    `values` and `scales` are `(*batch, heads, rows, dim)` and without dim; or, with a table
    `(*batch, pages_per_slot)` of int64, pages in place of batch rows. `offset` is `(heads, dim)`.
    """

    values: Array
    scales: Array | None = None
    page_table: Array | None = None
    offset: Array | None = None
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.values.shape
        if self.page_table is not None:
            *batch, pages = self.page_table.shape
            shape = (*batch, *shape[1:-2], pages * shape[-2], shape[-1])
        object.__setattr__(self, "shape", shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def page_size(self) -> int:
        return int(self.values.shape[-2])

    def broadcast(self, batch_shape: tuple[int, ...]) -> StoredRows:
        """The same with these leading dimensions."""
        if self.page_table is not None:
            slots = self.page_table.shape[-1:]
            table = np.broadcast_to(self.page_table, (*batch_shape, *slots))
            return replace(self, page_table=np.ascontiguousarray(table))
        values = np.broadcast_to(self.values, (*batch_shape, *self.values.shape[-3:]))
        if self.scales is None:
            return replace(self, values=values)
        scales = np.broadcast_to(self.scales, (*batch_shape, *self.scales.shape[-2:]))
        return replace(self, values=values, scales=scales)

    def read(self, index: tuple[Any, ...], head: int, rows: Any, dtype: np.dtype[Any]) -> Array:
        """Some rows of one batch row and kv head, in a floating type."""
        entry: tuple[Any, ...] = (*index, head, rows)
        if self.page_table is not None:
            number, row = np.divmod(np.arange(self.shape[-2])[rows], self.page_size)
            entry = (self.page_table[index][number], head, row)
        # Padding may hold any values, some of which would raise warnings of NumPy.
        with np.errstate(invalid="ignore", over="ignore"):
            array = self.values[entry].astype(dtype)
            if self.scales is not None:
                array *= self.scales[entry].astype(dtype)[..., None]
            if self.offset is not None:
                array += self.offset[head].astype(dtype)
        return np.asarray(array)


Rows: TypeAlias = Array | StoredRows
"""Keys or values of a problem, as an array or in storage of their own."""


def read_rows(
    source: Rows, index: tuple[Any, ...], head: int, rows: Any, dtype: np.dtype[Any]
) -> Array:
    """Some rows of one batch row and kv head; plain arrays of this type are read in place."""
    if isinstance(source, StoredRows):
        return source.read(index, head, rows, dtype)
    return np.asarray(source[(*index, head)][rows].astype(dtype, copy=False))


def storage_of(rows: Rows) -> Storage | None:
    """How stored rows lie; None for an array."""
    if not isinstance(rows, StoredRows):
        return None
    return Storage(rows.dtype.name, rows.page_table is not None)


def plain(rows: Rows) -> Array:
    """The array itself, for code that runs after stored rows have been gathered."""
    if isinstance(rows, StoredRows):
        raise TypeError("stored rows were not gathered")
    return rows


def whole_rows(source: Rows, dtype: np.dtype[Any]) -> Array:
    """The array that stored rows stand for, gathered: in its own type, or widened to `dtype`.

    A plain array is given back as it is.
    """
    if not isinstance(source, StoredRows):
        return source
    *batch, heads, length, dim = source.shape
    values, scales, table = source.values, source.scales, source.page_table
    out = np.empty(source.shape, gathered_dtype(source, dtype))
    in_pages = out
    if table is not None:
        size = source.page_size
        in_pages = out.reshape(*batch, heads, length // max(size, 1), size, dim).swapaxes(-4, -3)
    # Padding may hold any values, some of which would raise warnings of NumPy.
    with np.errstate(invalid="ignore", over="ignore"):
        for index in np.ndindex(*batch):  # No copy of all pages is held beside the result.
            own = index if table is None else table[index]
            if scales is None:
                in_pages[index] = values[own]
            else:
                by_rows = scales[own].astype(dtype, copy=False)[..., None]
                np.multiply(values[own], by_rows, out=in_pages[index], dtype=dtype)
        if source.offset is not None:
            out += source.offset.astype(dtype, copy=False)[:, None]
    return out


def gathered_dtype(rows: StoredRows, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of `whole_rows(rows, dtype)`."""
    return rows.dtype if rows.scales is None else dtype


def as_stored_rows(
    given: Paged | Quantized, role: str, layout: Literal["bhld", "blhd"]
) -> StoredRows:
    """Check what can be checked alone: types, dimensions and sizes; page numbers come later."""
    if isinstance(given, Quantized):
        return StoredRows(*_parts(given, role, layout))
    inner, table = given.pages, given.page_table
    for name, array in (("pages", inner), ("page_table", table)):
        if not isinstance(array, Paged | Quantized) and not hasattr(array, "ndim"):
            raise DTypeError(
                f"{name} of {role} is a {type(array).__name__}, not an array.",
                action=f"Pass {name} as an array.",
            )
    if isinstance(inner, Paged):
        raise ArgumentError(
            f"the pages of {role} are Paged themselves.",
            action="Pass an array, or Quantized, as pages.",
        )
    if isinstance(inner, Quantized):
        values, scales, _, offset = _parts(inner, f"{role} pages", layout)
    else:
        values, scales, offset = _heads_first(inner, layout), None, None

    def seen() -> list[tuple[str, str]]:
        pages = [("pages", f"{inner.dtype} {inner.shape}")] if isinstance(inner, np.ndarray) else []
        return [*pages, ("page_table", f"{table.dtype} {table.shape}")]

    if values.ndim != 4:
        raise ShapeError(
            f"the pages of {role} have {values.ndim} dimensions, not 4.",
            seen(),
            "Pass (num_pages, num_kv_heads, page_size, dim).",
        )
    if table.dtype.kind not in "iu":
        raise DTypeError(
            f"the page_table of {role} has dtype {table.dtype}, not an integer type.",
            seen(),
            "Pass page_table.astype(int).",
        )
    if table.ndim < 1:
        raise ShapeError(
            f"the page_table of {role} is one number.", seen(), "Pass (..., pages_per_slot)."
        )
    # Kernels read the table in C order.
    return StoredRows(values, scales, np.ascontiguousarray(table, np.int64), offset)


def _parts(given: Quantized, role: str, layout: str) -> tuple[Array, Array, None, Array | None]:
    """Checked values, scales and offset of `StoredRows`, without a table."""
    values, scales, offset = given.values, given.scales, given.offset
    for name, array in (("values", values), ("scales", scales), ("offset", offset)):
        if name == "offset" and array is None:
            continue
        if not hasattr(array, "dtype") or not hasattr(array, "shape"):
            raise DTypeError(
                f"{name} of {role} is a {type(array).__name__}, not an array.",
                action="Pass a float32 array (num_kv_heads, dim)."
                if name == "offset"
                else "Pass what qkv.cache.quantize returns.",
            )

    def seen() -> list[tuple[str, str]]:
        arrays = ("values", values), ("scales", scales)
        return [(name, f"{array.dtype} {array.shape}") for name, array in arrays]

    if values.dtype != np.int8 or scales.dtype != np.float32:
        raise DTypeError(
            f"{role} is Quantized from {values.dtype} values and {scales.dtype} scales.",
            seen(),
            "Pass int8 values and float32 scales.",
        )
    if values.ndim < 2 or scales.shape != values.shape[:-1]:
        raise ShapeError(
            f"{role} has values {values.shape} and scales {scales.shape}.",
            seen(),
            "Pass values (..., heads, length, dim) and scales (..., heads, length).",
        )
    if values.ndim == 2:
        values, scales = values[None], scales[None]
    elif layout == "blhd":
        values, scales = _heads_first(values, layout), scales.swapaxes(-2, -1)
    if offset is None:
        return values, scales, None, None
    if role.startswith("value"):
        raise ArgumentError(
            "value has an offset, which only keys may have.", seen(), "Leave it out."
        )
    heads, dim = values.shape[-3], values.shape[-1]
    if offset.dtype != np.float32 or offset.shape != (heads, dim):
        raise ShapeError(
            f"{role} has an offset {offset.dtype} {offset.shape}; it needs float32 {(heads, dim)}.",
            seen(),
            "Pass (num_kv_heads, dim), whatever the layout.",
        )
    return values, scales, None, offset


def _heads_first(array: Array, layout: str) -> Array:
    return array.swapaxes(-3, -2) if layout == "blhd" and array.ndim > 2 else array


def scores_of_offset(query: Array, offset: Array, scale: float) -> Array:
    """What the offset `(num_kv_heads, dim)` of keys adds to all scores of a query.

    Returns
    -------
    array (*batch, num_heads, q_len, 1)
        In float32, float64 for float64 queries. Each row is added up by itself, from adjacent
        elements: a product of matrices rounds in another order with other strides or row numbers.
    """
    wide: np.dtype[Any] = np.dtype(np.float64 if query.dtype == np.float64 else np.float32)
    scaled: Array = offset.astype(wide, copy=False) * wide.type(scale)
    group = query.shape[-3] // len(offset)
    per_head = scaled.repeat(group, axis=0)[:, None]
    return np.asarray(np.vecdot(np.ascontiguousarray(query, wide), per_head))[..., None]


def checked_pages(rows: Rows, kv_lens: Array | None, role: str) -> Rows:
    """Pages that are real, in every entry that the lengths allow to be read; 0 in the others.

    `kv_lens` has one length for each batch row. What is checked here is a copy: what the caller
    does to the table later changes nothing.
    """
    if not isinstance(rows, StoredRows) or rows.page_table is None:
        return rows
    table = rows.page_table
    num_pages, slots = len(rows.values), table.shape[-1]
    flat = table.reshape(math.prod(table.shape[:-1]), slots)
    used = np.ones(flat.shape, bool)
    if kv_lens is not None:
        lens = np.broadcast_to(kv_lens, len(flat))
        used = np.arange(slots) * rows.page_size < lens[:, None]
    inside = (flat >= 0) & (flat < num_pages)
    wrong = used & ~inside
    if wrong.any() or (flat.size and not num_pages):
        batch, slot = np.argwhere(wrong)[0] if wrong.any() else (0, 0)
        raise ShapeError(
            f"entry {slot} of row {batch} of the page_table of {role} is {flat[batch, slot]}; "
            f"there are {num_pages} pages.",
            [("pages", f"{rows.dtype} {rows.values.shape}"), ("page_table", f"{table.shape}")],
            "Pass numbers of pages, or KeyLengths that end before the entry.",
        )
    real = np.where(inside, flat, 0)
    return replace(rows, page_table=np.ascontiguousarray(real).reshape(table.shape))
