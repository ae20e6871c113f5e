"""Run a bound call of arrays in memory: prepared if it repeats an earlier one, else checked.

Two calls are alike if their structures are equal but for the position of the queries, and their
forms (`qkv.call.repeated.forms`). A call that is like an earlier one takes addresses and runs.
The latest call of each structure is tried first, since working a form out takes longer than a short
call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv._dynamo import ends_graph
from qkv.backends import Passes
from qkv.call.binding.bound import BoundCall
from qkv.call.checked import CheckedCall, check_call
from qkv.call.repeated.cache import CALLS, PreparedCall
from qkv.call.repeated.decoding import run_step
from qkv.call.repeated.forms import Views, form_of, has_form, heads_first, in_place, values_of
from qkv.call.repeated.latest_step import LatestStep
from qkv.call.repeated.numpy_runs import run_on_arrays
from qkv.call.repeated.preparing import prepare
from qkv.call.repeated.stored_steps import stored_step
from qkv.partial import Partial

__all__ = ["Attended", "attend", "restored", "run_alike", "run_known"]

Array = NDArray[Any]


class Attended(NamedTuple):
    """Results as arrays of the query's library.

    `lse` and `lse_rest` (the rounding error of lse, None if unknown) are undefined unless they were
    requested. `unrounded` is for the backward pass: a NumPy array in the type of computation and in
    the layout of the call, None if the output is of that type, or is all that there is. `call` and
    `partial`, what the backward pass reads, are set if it was asked for and the call was checked.
    """

    out: Any
    lse: Any
    lse_rest: Array | None = None
    unrounded: Array | None = None
    call: CheckedCall | None = None
    partial: Partial | None = None


def attend(
    bound: BoundCall,
    *,
    rows: bool = True,
    backward: bool = False,
    differentiable: bool = False,
    given: Sequence[Any] | None = None,
) -> Attended:
    """Output and lse of a bound call.

    Parameters
    ----------
    bound : BoundCall
    rows : bool
        Whether lse is wanted.
    backward : bool
        Whether a backward pass will follow.
    differentiable : bool
        Whether a backend that computes no gradients is to be refused.
    given : sequence, optional
        The variants as the caller gave them.
    """
    passes: Passes = "residuals" if backward else "forward"
    entry = CALLS.entry(bound.structure)
    # Read once: another thread may drop it.
    first = None if entry is None or backward else entry.first_of_arrays
    if first is not None:
        repeated = _repeat(first, bound, rows)
        if repeated is not None:
            return repeated
    latest = None if entry is None or backward else entry.first_of_steps
    if latest is not None:
        results = latest.results(bound, rows)
        if results is not None:
            return Attended(*results)
    views = heads_first(bound)
    form = None if views is None else form_of(bound, views, passes, entry)
    if entry is not None and views is not None and form is not None:
        known = entry.calls.get(form)
        if known is not None:
            results = run_known(known, bound, views, rows)
            if results is not None:
                if not backward:  # It is tried first when there is another one.
                    entry.first_of_arrays = known if known.if_alike else None
                    if known.step is not None:
                        kv_len = views[1].shape[-2]
                        entry.first_of_steps = LatestStep.of(known, bound, kv_len)
                return restored(results, bound)
            CALLS.discard(bound.structure, known)
    stored = None if backward or views is not None else stored_step(bound)
    if stored is not None:
        results = stored.run(entry, rows)
        if results is not None:
            out, lse, *_ = restored(results, bound)
            restore = stored.library.restore
            return Attended(restore(out), None if lse is None else restore(lse))
    call = check_call(bound, given, backward=differentiable)
    if stored is not None:
        stored.prepare(entry, call)
    if form is not None and views is not None and CALLS.is_repeated(bound.structure, form):
        prepare(bound, form, views, call)
    out, lse, partial = call.compute(backward=backward)
    if not backward:
        return Attended(out, lse)
    kept = call.kept(partial)
    unrounded = None if kept.out.dtype == call.dtype else call.arranged(kept.out)
    return Attended(out, lse, partial.lse_rest, unrounded, call, kept)


ends_graph(attend, "qkv.attention of NumPy arrays")


def run_alike(prepared: PreparedCall, bound: BoundCall, rows: bool) -> Attended | None:
    """The results of a prepared call; None if the arrays have another form, or it cannot run."""
    if prepared.if_alike is not None:
        repeated = _repeat(prepared, bound, rows)
        if repeated is not None:
            return repeated
    views = heads_first(bound)
    if views is None or not has_form(bound, views, prepared.form):
        return None
    results = run_known(prepared, bound, views, rows)
    return None if results is None else restored(results, bound)


def run_known(known: PreparedCall, bound: BoundCall, views: Views, rows: bool) -> Any:
    """The results of a prepared call; None if something is not as it was prepared for."""
    known.used = CALLS.clock
    if known.step is None:
        return run_on_arrays(known.prepared, views, in_place(bound), rows=rows)
    return run_step(known.prepared, known.step, bound, views, rows)


def _repeat(first: PreparedCall, bound: BoundCall, rows: bool) -> Attended | None:
    """The results of a prepared call of this structure, if the arrays are as it asks."""
    structure, leaves = bound
    query, key, value = leaves[:3]
    if not type(query) is type(key) is type(value) is np.ndarray:
        return None
    step, q_offset = first.step, structure.options.q_offset
    if step is not None and type(q_offset) is int:
        # `if_alike` puts the last query at the last key, and compares no arrays of variants.
        axis = -2 if structure.layout == "bhld" else -3
        if len(leaves) > 3 or min(key.ndim, query.ndim) < 3:
            return None
        if q_offset != key.shape[axis] - query.shape[axis]:
            return None
    elif (len(leaves) > 3 or first.form.values) and values_of(bound) != first.form.values:
        return None
    if_alike: Any = first.if_alike
    arrays = () if len(leaves) == 3 else in_place(bound)
    if structure.options.layout == "bhld":
        results = if_alike(query, key, value, rows, arrays)
        if results is None:
            return None
        first.used = CALLS.clock
        return Attended(*results)
    views = heads_first(bound)
    results = None if views is None else if_alike(*views, rows, arrays)
    if results is None:
        return None
    first.used = CALLS.clock
    return restored(results, bound)


def restored(results: Sequence[Any], bound: BoundCall) -> Attended:
    """Results of prepared calls in the layout of the call."""
    attended = Attended(*results)
    if bound.structure.layout != "blhd":
        return attended
    out, lse, lse_rest, unrounded, *_ = attended
    if unrounded is not None:
        unrounded = unrounded.swapaxes(-3, -2)
    return Attended(np.ascontiguousarray(out.swapaxes(-3, -2)), lse, lse_rest, unrounded)
