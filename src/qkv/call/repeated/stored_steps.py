"""Decoding steps over keys and values in pages, as int8, or both: forms, and prepared runs.

They are alike as steps over arrays are (`qkv.call.repeated.forms`), whatever their number of keys.
The layout of a page belongs to the form. A step checks the page table, the lengths and the
positions that it brings; what is not as usual is left to the checked call, which has the error or
the result.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from numpy.typing import NDArray

from qkv.arrays import ArrayLibrary
from qkv.call.binding.bound import BoundCall
from qkv.call.binding.flatten import ReadByValue, ReadInPlace, Tree
from qkv.call.checked import CheckedCall, views_of
from qkv.call.repeated.cache import CALLS, Entry, Form
from qkv.call.repeated.decoding import run_step
from qkv.call.repeated.forms import step_form
from qkv.call.repeated.latest_step import LatestStep, are_pages
from qkv.call.repeated.preparing import prepared_by
from qkv.errors import QkvError
from qkv.problem.stored_rows import Paged, Quantized, Rows, StoredRows, as_stored_rows

__all__ = ["StoredStep", "stored_step"]

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
            entry.first_of_steps = LatestStep.of(known, self.bound, key.shape[-2])
        return results

    def prepare(self, entry: Entry | None, call: CheckedCall) -> None:
        """Keep what the backend prepares for steps like this one, which was checked."""
        structure, form = self.bound.structure, self.form
        if entry is not None and form in entry.calls:
            return  # Backends prepare no such steps, or others have just done so.
        if CALLS.is_repeated(structure, form):
            CALLS.insert(structure, form, prepared_by(self.bound, form, call))


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
    return are_pages(rows.page_table, len(rows.values))
