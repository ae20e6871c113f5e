"""What is prepared for a problem: which kernel, and which compiled passes go around it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Passes, Prepared, ResultForm
from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.plan import schedule
from qkv.backends.cpu.plan.block_skipping import skips_by_value
from qkv.backends.cpu.plan.kernel_choice import is_decode
from qkv.backends.cpu.prepared import stages
from qkv.backends.cpu.prepared.call import PassesOfCall
from qkv.backends.cpu.prepared.kernel import Kernel
from qkv.backends.cpu.prepared.placeholders import tables_of
from qkv.partial import RowStatistics
from qkv.problem.backward import BackwardInputs
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import StoredRows, gathered_dtype
from qkv.process.forks import importing

__all__ = ["prepare"]

Array = NDArray[Any]


def prepare(
    problem: Problem,
    passes: Passes,
    *,
    any_length: bool,
    arrays: tuple[Array, ...],
    inputs: BackwardInputs | None,
) -> Prepared | None:
    """See `qkv.backends.Preparing`."""
    spec = problem.spec
    sizes = (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len, spec.v_head_dim)
    if 0 in sizes:
        return None
    # Of keys and values in storage of their own, decoding steps alone are prepared.
    if (spec.key_storage or spec.value_storage) and not any_length:
        return None
    is_short = is_decode(spec, host().shape_of(spec.compute_dtype))
    if any_length:
        return _for_any_length(problem, arrays) if is_short else None
    if spec.rotation and not stages.is_rotation_kept(problem):
        return None
    if inputs is not None:
        with importing():
            from qkv.backends.cpu.prepared import backward

        if not (backward.is_preparable(problem, inputs) and _is_scheduled_alike(problem, arrays)):
            return None
        return backward.PassesOfGradients(problem, inputs, arrays).prepared()
    form = stages.rotated_form(problem) if spec.rotation else problem
    if is_short:
        if passes == "statistics" or not all(tables_of(problem, arrays)):
            return None
        with importing():
            from qkv.backends.cpu.prepared.decode import decode_kernel

        kernel = decode_kernel(form, arrays)
    elif _is_scheduled_alike(problem, arrays):
        with importing():
            from qkv.backends.cpu.prepared.forward import forward_kernel

        kernel = forward_kernel(form, passes, arrays)
    else:
        return None
    return _prepared(problem, kernel, passes, is_short)


def _prepared(problem: Problem, kernel: Kernel, passes: Passes, is_short: bool) -> Prepared:
    """The kernel with what comes before and after it."""
    spec = problem.spec
    shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
    out = ResultForm(shape, np.dtype(spec.dtype))
    lse = ResultForm(shape[:-1], spec.compute_dtype)
    results, keeps = [out, lse], passes == "residuals" and not is_short
    if passes == "statistics":
        results += [lse] * len(fields(RowStatistics))
    elif keeps:
        results.append(lse)
        if out.dtype != lse.dtype:
            results.append(ResultForm(shape, lse.dtype))
    return PassesOfCall(problem, kernel, results, keeps=keeps).prepared()


def _for_any_length(problem: Problem, arrays: tuple[Array, ...]) -> Prepared | None:
    """Decoding steps over any number of keys, with the same constants.

    None if what variants hold, other than `arrays`, serves one number of keys only.
    """
    with importing():
        from qkv.backends.cpu.prepared.any_length import any_length_form
        from qkv.backends.cpu.prepared.steps import steps_kernel

    rotates, positions = problem.spec.rotation is not None, problem.operands.positions
    dtype = None
    if rotates:
        # Keys of all batch entries must share one table of angles, in which rows follow one
        # another: ranks within segments do not.
        ranks = positions.q_rank, positions.kv_rank
        if len(positions.kv_shift) > 1:
            return None
        if not all(isinstance(rank, int) for rank in ranks):
            return None
        query, key = problem.operands.query, problem.operands.key
        if isinstance(key, StoredRows):  # Rotated keys are arrays in any case.
            dtype = gathered_dtype(key, problem.spec.compute_dtype)
            query, whole_key = np.empty(query.shape, dtype), np.empty(key.shape, dtype)
            operands = replace(problem.operands, query=query, key=whole_key)
            problem = Problem(replace(problem.spec, key_storage=None), operands)
    form = stages.rotated_form(problem) if rotates else problem
    words = any_length_form(form, arrays)
    if words is None:
        return None
    kernel = steps_kernel(form, words, arrays)
    return replace(_prepared(problem, kernel, "forward", is_short=True), gathered_dtype=dtype)


def _is_scheduled_alike(problem: Problem, arrays: tuple[Array, ...]) -> bool:
    """Whether calls with other values in `arrays` compute the same pairs in many rows."""
    if skips_by_value(problem):
        return False
    if not arrays:
        return True
    mask, _ = schedule.cheap_conditions(problem, schedule.CHEAP_OPERATIONS)
    return all(names and not mask.tables & set(names) for names in tables_of(problem, arrays))
