"""Prepare for more calls like one that was checked."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from qkv.backends import Preparing
from qkv.call.binding.bound import BoundCall
from qkv.call.binding.flatten import ReadByValue, add_length_keys
from qkv.call.checked import CheckedCall
from qkv.call.repeated.cache import CALLS, Form, PreparedCall, StepForm
from qkv.call.repeated.decoding import arrays_from_lengths, arrays_from_offset
from qkv.call.repeated.forms import Views, fixed_form, in_place
from qkv.problem.backward import BackwardInputs

__all__ = ["prepare", "prepared_by"]


def prepare(
    bound: BoundCall,
    form: Form,
    views: Views,
    call: CheckedCall,
    inputs: BackwardInputs | None = None,
) -> None:
    """Keep a prepared call in the cache, if the backend prepares."""
    structure = bound.structure
    made = prepared_by(bound, form, call, inputs)
    if made is None and form.any_length:
        # Only one number of keys can be prepared for.
        CALLS.insert(structure, form, None)
        fixed = fixed_form(bound, views, form.passes)
        made = None if fixed is None else prepared_by(bound, fixed, call)
    if made is not None:
        CALLS.insert(structure, made.form, made)


def prepared_by(
    bound: BoundCall, form: Form, call: CheckedCall, inputs: BackwardInputs | None = None
) -> PreparedCall | None:
    """What the backend of a checked call prepares for a form; None if it does not.

    `inputs` are those of a backward pass, for gradients.
    """
    backend, problem, any_length = call.choice.backend, call.problem, form.any_length
    if call.ndim == 2 or not isinstance(backend, Preparing):
        return None
    align, structure = problem.operands.positions.align, bound.structure
    arrays = in_place(bound._replace(leaves=call.leaves), is_step=any_length)
    step, at_end = None, False
    if any_length:
        # Whether numbers and "start" or "end" agree depends on the lengths.
        of_rows = structure.options.q_offset is ReadByValue
        if (of_rows or type(structure.options.q_offset) is int) and align is not None:
            return None
        from_lengths, from_offset = [], arrays_from_offset(problem)
        if structure.lengths:
            from_lengths = arrays_from_lengths(problem, states_positions=of_rows)
            if not from_lengths:
                return None
        arrays, at_end = (*arrays, *from_lengths, *from_offset), align == "end"
        length_keys: list[Hashable] = []
        for tree in structure.variants:
            add_length_keys(tree, problem.spec.kv_len, length_keys)
        scale = problem.operands.scale if from_offset else None
        rotates_per_batch_row = (
            problem.spec.rotation is not None and len(problem.operands.positions.q_shift) > 1
        )
        step = StepForm(at_end, len(from_lengths), not length_keys, rotates_per_batch_row, scale)
    if any_length and type(structure.options.q_offset) is int:
        # Most such queries stand at the end, where `if_alike` puts them.
        positions = replace(problem.operands.positions, align="end")
        problem = replace(problem, operands=replace(problem.operands, positions=positions))
    made = backend.prepare(
        problem, form.passes, any_length=any_length, arrays=arrays, inputs=inputs
    )
    if made is None:
        return None
    # What a step says of lengths is not among the arrays that are looked at.
    says_nothing = step is None or (step.every_length and not (step.lengths or structure.per_step))
    sinks = problem.operands.sinks
    return PreparedCall(
        form, made, backend.name, call.choice.conditions, step,
        made.if_alike if says_nothing else None, None if sinks is None else sinks.copy(),
    )  # fmt: skip
