"""Prepared calls of tensors: those that `qkv.call` has prepared for NumPy arrays of the same form.

A call goes there if torch does not observe it. Whether tensors are like the latest of a structure,
torch answers in one call (`guards`). If they are not, the form of NumPy views of them is
looked up, as for arrays.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from qkv.bridges.torch.observers import looks_on
from qkv.bridges.torch.openmp import on_torch_threads
from qkv.bridges.torch.operands import LIBRARY, view_of
from qkv.bridges.torch.repeated.layouts import are_dense, gradients_wanted, leaf_values
from qkv.bridges.torch.repeated.runs import Run, Step, run_of
from qkv.call.attend import restored, run_known
from qkv.call.binding.bound import BoundCall
from qkv.call.repeated.cache import CALLS, Entry, PreparedCall
from qkv.call.repeated.forms import Views, form_of, has_form, heads_first
from qkv.call.repeated.stored_steps import stored_step
from qkv.errors import QkvError

__all__ = ["run_alike", "run_prepared", "run_step_of_span", "step_of"]


def run_prepared(entry: Entry, bound: BoundCall, rows: bool) -> Any:
    """Output, with lse if `rows`; None if nothing was prepared, or torch has to see the call.

    `entry` is that of the structure.
    """
    if looks_on():
        return None
    run: Run | None = entry.first_of_tensors
    if run is not None:
        structure, read = bound
        if structure.by_value:  # Most calls have none, and asking the property takes 0.1 us.
            read = bound.read_in_place
        if _fits(run, bound, read):
            results = run.compute(bound, read, rows)
            if results is not None:
                run.common.prepared.used = CALLS.clock
                return results
    with on_torch_threads():
        if not bound.structure.is_plain:
            return _run_stored(entry, bound, rows)
        found = _look_up(entry, bound)
        if found is None:
            return None
        prepared, seen, views, wanted = found
        read = bound.read_in_place
        run = _run_of(prepared, bound, read, wanted)
        if run is not None:
            entry.first_of_tensors = run
            return run.compute(bound, read, rows)
        results = None if wanted else run_known(prepared, seen, views, rows)
        return None if results is None else _tensors(results, seen)


def run_step_of_span(entry: Entry, bound: BoundCall, span: tuple[int, int], rows: bool) -> Any:
    """The same for a decoding step over the keys of `span`; None if it is not the latest run."""
    run: Run | None = entry.first_of_tensors
    read = bound.read_in_place
    if type(run) is not Step or looks_on() or not _fits(run, bound, read):
        return None
    results = run.compute(bound, read, rows, span)
    if results is not None:
        run.common.prepared.used = CALLS.clock
    return results


def run_alike(prepared: PreparedCall, bound: BoundCall, rows: bool) -> Any:
    """Output, with lse if `rows`, by a prepared call; None if it does not take these tensors."""
    read = bound.read_in_place
    if looks_on() or not are_dense(*read):
        return None
    wanted = gradients_wanted(read)
    if bool(wanted) != (prepared.form.passes == "residuals"):
        return None
    run = prepared.of_tensors.get(_alike(read, wanted))
    if run is None or not _fits(run, bound, read):
        seen = _seen(bound)
        if seen is None or not has_form(*seen, prepared.form):
            return None
        run = _run_of(prepared, bound, read, wanted)
    return None if run is None else run.compute(bound, read, rows)


def step_of(bound: BoundCall) -> Step | None:
    """The decoding step that is prepared for a call like this, for those who hold it themselves."""
    entry = None if looks_on() else CALLS.entry(bound.structure)
    found = None if entry is None else _look_up(entry, bound)
    if found is None:
        return None
    prepared, *_, wanted = found
    run = _run_of(prepared, bound, bound.read_in_place, wanted)
    return run if type(run) is Step and run.lengths is None else None


def _fits(run: Run, bound: BoundCall, read: Sequence[Any]) -> bool:
    """Whether a call is like those of a run."""
    _, fits, values, position = run.common
    if position is not None and position != bound.structure.options.q_offset:
        return False
    if values and leaf_values(bound) != values:
        return False
    try:
        for tensor in read:
            if tensor.is_nested:  # Asked for its shape by `fits`, it would end the process.
                return False
        return fits(*read)
    except (AttributeError, TypeError):  # An operand is not a tensor.
        return False


def _look_up(
    entry: Entry, bound: BoundCall
) -> tuple[PreparedCall, BoundCall, Views, tuple[bool, ...]] | None:
    """What is prepared for calls with the form of this one, this call of NumPy views, its
    operands with heads before rows, and which gradients are wanted."""
    read = bound.read_in_place
    seen = _seen(bound) if are_dense(*read) else None
    if seen is None:
        return None
    wanted = gradients_wanted(read)
    form = form_of(*seen, "residuals" if wanted else "forward", entry)
    prepared = None if form is None else entry.calls.get(form)
    if prepared is None:
        return None
    prepared.used = CALLS.clock
    return prepared, *seen, wanted


def _run_stored(entry: Entry, bound: BoundCall, rows: bool) -> Any:
    """Output, with lse if `rows`, of a decoding step over stored rows; None if it is checked."""
    tensors = [leaf for leaf in bound.leaves if type(leaf) is not np.ndarray]
    if not are_dense(*tensors) or gradients_wanted(tensors):
        return None
    latest = entry.first_of_steps
    found = None if latest is None else latest.results(bound, rows)
    if found is not None:
        return found if rows else found[0]
    step = stored_step(bound)
    results = None if step is None else step.run(entry, rows)
    return None if results is None else _tensors(results, bound)


def _tensors(results: Sequence[Any], bound: BoundCall) -> Any:
    """Output, with lse if there is one, as tensors."""
    out, lse, *_ = restored(results, bound)
    tensor = LIBRARY.restore(out)
    return tensor if lse is None else (tensor, LIBRARY.restore(lse))


def _alike(read: Sequence[Any], wanted: tuple[bool, ...]) -> Hashable:
    """What the tensors of one run have in common beside their form."""
    query, key, value = read[:3]
    return wanted, query is key, key is value


def _run_of(
    prepared: PreparedCall, bound: BoundCall, read: Sequence[Any], wanted: tuple[bool, ...]
) -> Run | None:
    alike = _alike(read, wanted)
    run: Run | None = prepared.of_tensors.get(alike)
    if run is None:
        run = run_of(prepared, bound, read, bool(wanted))
        if run is not None:
            prepared.of_tensors[alike] = run
    return run


def _seen(bound: BoundCall) -> tuple[BoundCall, Views] | None:
    """The call of NumPy views, and its operands with heads before rows.

    None if some array has no view, or is too large to be compared by value.
    """
    if leaf_values(bound) is None:
        return None
    try:
        leaves = [leaf if type(leaf) is np.ndarray else view_of(leaf) for leaf in bound.leaves]
    except QkvError:  # The checked call raises it again, with the name of the array.
        return None
    seen = BoundCall(bound.structure, leaves)
    views = heads_first(seen)
    return None if views is None else (seen, views)
