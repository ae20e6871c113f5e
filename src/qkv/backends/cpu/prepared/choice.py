"""What is prepared for a problem: which kernel, and which compiled passes go around it."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from qkv.backends import Passes
from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.passes.decode import is_decode
from qkv.backends.cpu.plan import schedule
from qkv.backends.cpu.plan.block_skipping import skips_by_value
from qkv.backends.cpu.prepared import backward, stages
from qkv.backends.cpu.prepared.any_length_decode import any_length_decode
from qkv.backends.cpu.prepared.decode import PreparedDecode
from qkv.backends.cpu.prepared.forward import PreparedForward
from qkv.backends.cpu.prepared.placeholders import tables_of
from qkv.problem.backward import BackwardInputs
from qkv.problem.expressions import tables
from qkv.problem.spec import Problem

__all__ = ["prepare"]

Array = NDArray[Any]


def prepare(
    problem: Problem,
    passes: Passes,
    *,
    any_length: bool,
    arrays: tuple[Array, ...],
    inputs: BackwardInputs | None,
) -> Any:
    """See `qkv.backends.Preparing`."""
    spec = problem.spec
    sizes = (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len, spec.v_head_dim)
    if 0 in sizes or spec.key_storage or spec.value_storage:
        return None
    is_short = is_decode(spec, host().shape_of(spec.compute_dtype))
    if any_length:
        return _for_any_length(problem, arrays) if is_short else None
    if spec.rotation and not stages.is_rotation_kept(problem):
        return None
    form = stages.rotated_form(problem) if spec.rotation else problem
    if inputs is not None:
        if not (backward.is_preparable(problem, inputs) and _is_scheduled_alike(problem, arrays)):
            return None
        gradients = backward.PreparedBackward(form, inputs, arrays)
        return stages.RotatedBackward(problem, gradients) if spec.rotation else gradients
    made: Any
    if is_short:
        if passes == "statistics" or not all(tables_of(problem, arrays)):
            return None
        made = PreparedDecode(form, arrays=arrays)
    elif _is_scheduled_alike(problem, arrays):
        made = PreparedForward(form, passes, arrays=arrays)
    else:
        return None
    if spec.sinks:
        made = stages.SinksCall(problem, made, backward=passes == "residuals")
    return stages.RotatedCall(problem, made) if spec.rotation else made


def _for_any_length(problem: Problem, arrays: tuple[Array, ...]) -> Any:
    """Decoding steps over any number of keys, with the same constants.

    None if what variants hold, other than `arrays`, serves one number of keys only.
    """
    if problem.spec.rotation is None:
        return any_length_decode(problem, arrays)
    positions = problem.operands.positions
    # All batch entries must share one table of angles.
    if max(len(positions.q_shift), len(positions.kv_shift)) > 1:
        return None
    made = any_length_decode(stages.rotated_form(problem), arrays)
    return None if made is None else stages.AnyLengthRotation(problem, made)


def _is_scheduled_alike(problem: Problem, arrays: tuple[Array, ...]) -> bool:
    """Whether calls with other values in `arrays` compute the same pairs in many rows."""
    if skips_by_value(problem):
        return False
    if not arrays:
        return True
    mask, _ = schedule.cheap_conditions(problem, schedule.CHEAP_OPERATIONS)
    return all(names and not tables(mask) & set(names) for names in tables_of(problem, arrays))
