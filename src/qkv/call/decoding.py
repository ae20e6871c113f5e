"""Decoding steps: calls that are alike whatever their number of keys.

That is so if their variants depend on positions only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Prepared
from qkv.call.bound import BoundCall
from qkv.call.cache import StepForm
from qkv.call.forms import Views, in_place
from qkv.call.numpy_port import run_on_arrays
from qkv.problem.spec import Problem

__all__ = ["arrays_from_lengths", "position", "run_step"]

Array = NDArray[Any]


def position(step: StepForm, given: Any, q_len: int, kv_len: int) -> int:
    """The position of query row 0; `given` is what the call said."""
    if type(given) is int:
        return given
    return kv_len - q_len if step.at_end else 0


def run_step(steps: Prepared, step: StepForm, bound: BoundCall, views: Views, rows: bool) -> Any:
    """The results of a step, None if something is not as it was prepared for."""
    query, key, _ = views
    q_len, kv_len = query.shape[-2], key.shape[-2]
    q_shift = position(step, bound.structure.options.q_offset, q_len, kv_len)
    arrays = in_place(bound, is_step=True)
    if step.lengths:
        lens = bound.leaves[bound.structure.lengths[0]].astype(np.int64)
        if lens.min() < 0 or lens.max() > kv_len:
            return None  # The checked call raises the error.
        batch_shape = query.shape[:-3]
        if lens.shape != batch_shape:
            lens = np.broadcast_to(lens, batch_shape)
        lens = lens.reshape(-1)
        if step.at_end and len(lens) == 1:
            q_shift = int(lens[0]) - q_len
        ends = (lens - q_len,) if step.lengths == 2 else ()
        arrays = (*arrays, lens, *ends)
    return run_on_arrays(steps, views, arrays, rows=rows, q_shift=q_shift)


def arrays_from_lengths(problem: Problem) -> list[Array]:
    """The tables `(batch,)` of the numbers of keys, and of where they put the queries, if they do.

    None of them if they are not the only such tables.
    """
    labels = {table.name: table.label for table in problem.spec.tables}
    origins, tables = problem.operands.origins, problem.operands.tables
    tables_of_steps: list[Array] = []
    for label in ("kv_lens", "q_offset"):
        arrays = [
            origins[name].array for name in tables if labels[name] == label and tables[name].ndim
        ]
        if len(arrays) > 1 or (label == "kv_lens" and not arrays):
            return []
        tables_of_steps += arrays
    has_q_offset = len(tables_of_steps) == 2
    return [] if has_q_offset and problem.operands.positions.align != "end" else tables_of_steps
