"""Decoding steps over keys and values in pages, as int8, or both: forms, and prepared runs.

They are alike as steps over arrays are (`qkv.call.repeated.forms`), whatever their number of keys.
The layout of a page belongs to the form. A step checks the page table, the lengths and the
positions that it brings; what is not as usual is left to the checked call, which has the error or
the result. The latest step of a structure is tried first: compiled code asks whether the arrays of
another one are laid out as its own, which takes less time than working a form out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.arrays import ArrayLibrary
from qkv.call.binding.bound import BoundCall
from qkv.call.binding.flatten import ReadByValue, ReadInPlace, Tree
from qkv.call.checked import CheckedCall, views_of
from qkv.call.repeated.cache import CALLS, Entry, Form, PreparedCall
from qkv.call.repeated.decoding import read_by_step, run_step
from qkv.call.repeated.forms import leaves_of_step, step_form
from qkv.call.repeated.preparing import prepared_by
from qkv.errors import QkvError
from qkv.problem.building.builder import INDEX_LIMIT
from qkv.problem.stored_rows import Paged, Quantized, Rows, StoredRows, as_stored_rows

__all__ = ["StoredRun", "StoredStep", "stored_step"]

Array = NDArray[Any]


class StoredStep(NamedTuple):
    """A decoding step whose keys or values are in storage of their own.

    Attributes
    ----------
    bound : BoundCall
        Of NumPy views.
    library : ArrayLibrary
        Of the query.
    views : tuple
        Query, key and value with heads before rows.
    form : Form
    """

    bound: BoundCall
    library: ArrayLibrary
    views: tuple[Array, Rows, Rows]
    form: Form

    def run(self, entry: Entry | None, rows: bool) -> Any:
        """The results as a prepared call gives them; None if this step is to be checked."""
        known = None if entry is None else entry.calls.get(self.form)
        if known is None or known.step is None:
            return None
        known.used = CALLS.clock
        _, key, value = self.views
        if not (_names_pages(key) and (_share_pages(key, value) or _names_pages(value))):
            return None
        results = run_step(known.prepared, known.step, self.bound, self.views, rows)
        if results is None:
            CALLS.discard(self.bound.structure, known)
        elif entry is not None:
            entry.first_of_stored = StoredRun.of(known, self.bound, key.shape[-2])
        return results

    def prepare(self, entry: Entry | None, call: CheckedCall) -> None:
        """Keep what the backend prepares for steps like this one, which was checked."""
        structure, form = self.bound.structure, self.form
        if entry is not None and form in entry.calls:
            return  # Backends prepare no such steps, or others have just done so.
        if CALLS.is_repeated(structure, form):
            CALLS.insert(structure, form, prepared_by(self.bound, form, call))


class _Places(NamedTuple):
    """Which leaf of a call is what part of its keys or values; None if there is no such part."""

    rows: int
    scales: int | None
    offset: int | None
    table: int | None


class StoredRun(NamedTuple):
    """A prepared step that is tried before a form is worked out.

    Attributes
    ----------
    known : PreparedCall
    beside : tuple
        What compiled code does not ask: values, types and sizes of the arrays beside the operands.
    """

    known: PreparedCall
    beside: tuple[Hashable, ...]

    @classmethod
    def of(cls, known: PreparedCall, bound: BoundCall, kv_len: int) -> StoredRun | None:
        """The step of this call; None if compiled code asks too little to tell what is like it."""
        step, beside = known.step, _beside(bound, kv_len)
        asks = step is not None and step.every_length and known.prepared.if_alike is not None
        if beside is None or not asks or bound.structure.layout != "bhld":
            return None
        return cls(known, beside)

    def results(self, bound: BoundCall, rows: bool) -> tuple[Any, Any] | None:
        """Output and lse as arrays of the query's library; None if a step is not like this one."""
        known, structure = self.known, bound.structure
        key, value = _places(structure.operands)
        position = structure.options.q_offset
        if type(position) is int and abs(position) > INDEX_LIMIT:
            return None
        try:
            library, leaves = views_of(bound)
            bound, query, keys = BoundCall(structure, leaves), leaves[0], leaves[key.rows]
            kv_len = keys.shape[-2]
            if key.table is not None:
                kv_len *= leaves[key.table].shape[-1]
            if _beside(bound, kv_len) != self.beside or query.ndim < 3:
                return None
        except (QkvError, AttributeError, IndexError, TypeError, ValueError):
            return None  # The checked call has the error.
        assert known.step is not None
        offset = None if key.offset is None else leaves[key.offset]
        read = read_by_step(known.step, bound, query, kv_len, offset)
        if read is None:
            return None
        q_shift, arrays = read[0], [*read[1]]
        for part in (key, value):
            if part.table is not None:
                # Kernels read the table in C order.
                table = np.ascontiguousarray(leaves[part.table], np.int64)
                if not _are_pages(table, len(leaves[part.rows])):
                    return None
                arrays.append(table)
            if part.scales is not None:
                arrays.append(leaves[part.scales])
        if_alike: Any = known.prepared.if_alike
        results = if_alike(query, keys, leaves[value.rows], rows, arrays, q_shift)
        if results is None:
            return None
        known.used = CALLS.clock
        out, lse = results
        return library.restore(out), None if lse is None else library.restore(lse)


@lru_cache(maxsize=64)
def _places(operands: tuple[Tree, ...]) -> tuple[_Places, _Places]:
    """Where the parts of keys and values are among the leaves of a call."""
    following = iter(range(1, 9))

    def of_operand(tree: Tree) -> _Places:
        if type(tree) is not tuple:
            return _Places(next(following), None, None, None)
        kind, *parts = tree
        if kind is Paged:
            rows = of_operand(parts[0])
            return rows._replace(table=next(following))
        values, scales = next(following), next(following)
        return _Places(values, scales, None if parts[-1] is None else next(following), None)

    key, value = (of_operand(tree) for tree in operands[1:])
    return key, value


def _beside(bound: BoundCall, kv_len: int) -> tuple[Hashable, ...] | None:
    """Values, types and sizes of arrays beside the rows; None if they are large.

    Those are the arrays of variants, and the offset of quantised keys.
    """
    structure, leaves = bound
    values: tuple[Hashable, ...] = ()
    layouts: list[Hashable] = []
    if len(leaves) > structure.operand_leaves:
        found = leaves_of_step(bound, kv_len)
        if found is None:
            return None
        values, layouts = found
    offset = _places(structure.operands)[0].offset
    if offset is not None:
        layouts += leaves[offset].dtype, leaves[offset].shape
    return (*values, *layouts)


def _are_pages(table: Array, count: int) -> bool:
    """Whether every entry of a table is one of so many pages."""
    # Negative entries are large without a sign.
    entries = table.view(np.uint64)
    return bool(entries.size and np.maximum.reduce(entries, axis=None) < count)


def stored_step(bound: BoundCall) -> StoredStep | None:
    """A call as a step over stored rows; None of any other call."""
    structure, layout = bound.structure, bound.structure.layout
    if structure.is_plain or layout not in ("bhld", "blhd"):
        return None
    try:
        library, leaves = views_of(bound)
        bound = BoundCall(structure, leaves)
        following = iter(leaves)
        query, key, value = (_operand(tree, following) for tree in structure.operands)
        views = (
            query.swapaxes(-3, -2) if layout == "blhd" else query,
            _heads_first(key, "key", layout),
            _heads_first(value, "value", layout),
        )
        # Several axes of a batch have no single stride.
        form = step_form(bound, views, "forward") if query.ndim in (3, 4) else None
    except (QkvError, AttributeError, TypeError, ValueError):
        return None  # The checked call has the error.
    if form is None:
        return None
    pages = _layout_of_pages(views[1]), _layout_of_pages(views[2])
    form = Form(form.passes, form.any_length, form.values, (*form.layouts, *pages))
    return StoredStep(bound, library, views, form)


def _operand(tree: Tree, leaves: Iterator[Array]) -> Any:
    """What `unflatten` makes of an operand that is an array, or rows in pages or as int8."""
    if tree is None:
        return None
    if tree is ReadInPlace or tree is ReadByValue:
        return next(leaves)
    kind, *parts = tree
    if kind is not Paged and kind is not Quantized:
        raise TypeError(f"{kind} is not an operand")
    return kind(*[_operand(part, leaves) for part in parts])


def _heads_first(given: Any, name: str, layout: Any) -> Rows:
    """Keys or values as the problem would have them."""
    if isinstance(given, Paged | Quantized):
        return as_stored_rows(given, name, layout)
    array: Array = given.swapaxes(-3, -2) if layout == "blhd" else given
    return array


def _layout_of_pages(rows: Rows) -> Hashable:
    """What the form of a call has of a page: its sizes and strides, and those of its scales."""
    if not isinstance(rows, StoredRows) or rows.page_table is None:
        return None
    scales = None if rows.scales is None else rows.scales.strides
    return rows.values.shape[1:], rows.values.strides, scales


def _share_pages(key: Rows, value: Rows) -> bool:
    """Whether the same entries of one table name pages of both."""
    if not (isinstance(key, StoredRows) and isinstance(value, StoredRows)):
        return False
    return key.page_table is value.page_table and len(key.values) == len(value.values)


def _names_pages(rows: Rows) -> bool:
    """Whether every entry of the table, if there is one, is a page."""
    if not isinstance(rows, StoredRows) or rows.page_table is None:
        return True
    return _are_pages(rows.page_table, len(rows.values))
