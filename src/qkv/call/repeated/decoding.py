"""Decoding steps: calls that are alike whatever their number of keys.

That is so if their variants depend on positions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import LONGEST_STEP, Prepared
from qkv.call.binding.bound import BoundCall
from qkv.call.binding.flatten import ReadByValue
from qkv.call.repeated.cache import StepForm
from qkv.call.repeated.forms import in_place
from qkv.call.repeated.numpy_runs import run_on_arrays, run_on_stored_rows
from qkv.problem.building.check import KEY_OFFSET
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import scores_of_offset, whole_rows

__all__ = ["arrays_from_lengths", "arrays_from_offset", "lengths_of_step", "position",
           "read_by_step", "run_step"]  # fmt: skip

Array = NDArray[Any]


def position(step: StepForm, given: Any, q_len: int, kv_len: int) -> int:
    """The position of query row 0; `given` is what the call said."""
    if type(given) is int:
        return given
    return kv_len - q_len if step.at_end else 0


def run_step(
    steps: Prepared, step: StepForm, bound: BoundCall, views: Sequence[Any], rows: bool
) -> Any:
    """The results of a step, None if something is not as it was prepared for.

    `views` are query, key and value with heads before rows; the last two may be `StoredRows`.
    """
    query, key, _ = views
    found = read_by_step(step, bound, query, key.shape[-2], getattr(key, "offset", None))
    if found is None:
        return None
    q_shift, arrays = found
    if bound.structure.is_plain:
        return run_on_arrays(steps, views, arrays, rows=rows, q_shift=q_shift)
    dtype = steps.gathered_dtype
    if dtype is not None:
        views = (query.astype(dtype, copy=False), whole_rows(key, dtype), views[2])
    return run_on_stored_rows(steps, views, arrays, rows=rows, q_shift=q_shift)


def read_by_step(
    step: StepForm, bound: BoundCall, query: Array, kv_len: int, key_offset: Array | None
) -> tuple[int | Array, tuple[Array, ...]] | None:
    """The position of query row 0, or one for each batch row, and the arrays that a step reads
    beside its operands.

    None if the step has to be checked. `query` has heads before rows.
    """
    q_len = query.shape[-2]
    q_shift: int | Array = position(step, bound.structure.options.q_offset, q_len, kv_len)
    arrays = in_place(bound, is_step=True)
    if step.lengths:
        found = lengths_of_step(step, bound, query.shape[:-3], q_len, kv_len)
        if found is None:
            return None
        q_shift, tables = (q_shift if found[0] is None else found[0]), found[1]
        arrays = (*arrays, *tables)
    if step.offset_scale is not None:
        assert key_offset is not None
        arrays = (*arrays, scores_of_offset(query, key_offset, step.offset_scale))
    return q_shift, arrays


def lengths_of_step(
    step: StepForm, bound: BoundCall, batch_shape: tuple[int, ...], q_len: int, kv_len: int
) -> tuple[int | Array | None, tuple[Array, ...]] | None:
    """What a step reads of its numbers of keys; None if the step has to be checked.

    The position of query row 0, if the numbers decide it, or one for each batch row, and arrays.
    """
    lens = bound.leaves[bound.structure.lengths[0]].astype(np.int64)
    # Negative ones are large without a sign.
    if lens.size and np.maximum.reduce(lens.view(np.uint64), axis=None) > kv_len:
        return None  # The checked call raises the error.
    if lens.shape != batch_shape:
        lens = np.broadcast_to(lens, batch_shape)
    lens = lens.reshape(-1)
    if step.rotates_per_batch_row:
        positions = lens - q_len if step.at_end else _positions_of_rows(bound, batch_shape)
        return None if positions is None else (positions, (lens, positions)[: step.lengths])
    q_shift: int | None = None
    if step.at_end and len(lens) == 1:
        q_shift = int(lens[0]) - q_len
    elif step.lengths == 1 and bound.structure.options.q_offset is ReadByValue:
        # All rows stood at one position when this was prepared: it is a number of the step.
        given = _positions_of_rows(bound, batch_shape)
        if given is None or not given.size or (given != given[0]).any():
            return None
        q_shift = int(given[0])
    if step.lengths == 1:
        return q_shift, (lens,)
    ends = lens - q_len if step.at_end else _positions_of_rows(bound, batch_shape)
    return None if ends is None else (q_shift, (lens, ends))


def _positions_of_rows(bound: BoundCall, batch_shape: tuple[int, ...]) -> Array | None:
    """The position of the first query of each batch row, which the call states.

    None if they do not fit the batch, or are beyond what steps are prepared for.
    """
    given = bound.leaves[-1]
    if given.shape != batch_shape or given.dtype.kind not in "iu":
        return None
    if given.size and (given.min() < -LONGEST_STEP or given.max() > LONGEST_STEP):
        return None
    return np.asarray(given.astype(np.int64).reshape(-1))


def arrays_from_lengths(problem: Problem, *, states_positions: bool) -> list[Array]:
    """The tables `(batch,)` of the numbers of keys, and of where they put the queries, if they do.

    `states_positions` says that the call puts the queries of each batch row somewhere itself. None
    of them if they are not the only such tables.
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
    if has_q_offset and not states_positions and problem.operands.positions.align != "end":
        return []
    return tables_of_steps


def arrays_from_offset(problem: Problem) -> list[Array]:
    """What the offset of quantised keys adds to the scores of each query, if they have one."""
    tables = [table.name for table in problem.spec.tables if table.label == KEY_OFFSET]
    return [problem.operands.origins[name].array for name in tables]
