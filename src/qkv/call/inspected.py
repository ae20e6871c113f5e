"""Run a bound call for inspection: output, lse and statistics of its rows, prepared or checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.copies import own_copy
from qkv.backends import Inspectable
from qkv.call.binding.bound import BoundCall
from qkv.call.checked import CheckedCall, check_call, views_of
from qkv.call.device_call import DeviceCall, check_device_call, is_device_call
from qkv.call.repeated.cache import CALLS
from qkv.call.repeated.forms import fixed_form, heads_first, in_place
from qkv.call.repeated.numpy_runs import run_on_arrays
from qkv.call.repeated.preparing import prepare
from qkv.partial import RowStatistics, share_with_sinks

__all__ = ["Inspected", "attend_for_inspection"]

Array = NDArray[Any]


@dataclass(eq=False)
class Inspected:
    """The results of a run for inspection.

    Attributes
    ----------
    output, lse : array
        As `qkv.attention` returns them.
    row_lse : array (*batch_shape, num_heads, q_len)
        lse as a NumPy array.
    rows : RowStatistics or None
        With the shape of `row_lse`, sinks included; None if the backend computes none.
    backend : str
        The backend that ran.
    check : callable
        Gives the checked call.
    """

    output: Any
    lse: Any
    row_lse: Array
    rows: RowStatistics | None
    backend: str
    check: Callable[[], CheckedCall]

    @cached_property
    def call(self) -> CheckedCall:
        """The checked call, in main memory; checked now, if the run was prepared."""
        return self.check()

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: the checked call, in the place of what makes it."""
        return {**self.__dict__, "call": self.call, "check": None}

    def copy_tables(self) -> None:
        """Copy the arrays that variants without declared fields hold, which are not leaves."""
        operands = self.call.problem.operands
        tables = {name: own_copy(table) for name, table in operands.tables.items()}
        problem = replace(self.call.problem, operands=replace(operands, tables=tables))
        self.call = replace(self.call, problem=problem)


def attend_for_inspection(bound: BoundCall) -> Inspected:
    """Run a bound call; its record knows the variants as the call holds them."""
    if is_device_call(bound):
        return _on_device(check_device_call(bound))
    library, leaves = views_of(bound)
    seen = bound._replace(leaves=leaves)
    views = heads_first(seen)
    form = None if views is None else fixed_form(seen, views, "statistics")
    entry = CALLS.entry(bound.structure)
    known = None if entry is None or form is None else entry.calls.get(form)
    if views is not None and known is not None:
        known.used = CALLS.clock
        results = run_on_arrays(known.prepared, views, in_place(seen))
        if results is not None:
            out, lse, *alone = results
            rows = share_with_sinks(RowStatistics(*alone), known.sinks)
            if bound.structure.layout == "blhd":
                out = np.ascontiguousarray(out.swapaxes(-3, -2))
            restored = library.restore(out), library.restore(lse)
            return Inspected(*restored, lse, rows, known.backend, lambda: _check(bound))
        CALLS.discard(bound.structure, known)
    call = _check(bound)
    if form is not None and views is not None and CALLS.is_repeated(bound.structure, form):
        prepare(bound, form, views, call)
    return _checked(call)


def _check(bound: BoundCall) -> CheckedCall:
    return check_call(bound, bound.unflatten().variants)


def _checked(call: CheckedCall) -> Inspected:
    backend, sinks = call.choice.backend, call.problem.operands.sinks
    rows = None
    if isinstance(backend, Inspectable):
        partial, alone = backend.run_with_statistics(call.problem)
        partial, rows = call.with_sinks(partial), share_with_sinks(alone, sinks)
    else:
        partial = call.run()
    output, lse = call.output(partial), call.rows(partial.lse)
    return Inspected(output, lse, partial.lse, rows, backend.name, lambda: call)


def _on_device(call: DeviceCall) -> Inspected:
    """Statistics come from copies in main memory."""
    on_host = _checked(call.on_host())
    output, _ = call.attend(lse=False)
    lse = call.rows(on_host.row_lse)
    host = on_host.call
    return Inspected(
        output, lse, on_host.row_lse, on_host.rows, call.choice.backend.name, lambda: host
    )
