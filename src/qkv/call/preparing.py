"""Prepare for more calls like one that was checked, once there has been another."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from qkv.backends import (
    Preparing,
    PreparingStatistics,
    PreparingSteps,
    RepeatingCall,
    RepeatingSteps,
)
from qkv.call.bound import BoundCall
from qkv.call.cache import CALLS, Form, PreparedCall, StepForm
from qkv.call.checked import CheckedCall
from qkv.call.decoding import arrays_from_lengths
from qkv.call.flatten import add_length_keys
from qkv.call.forms import Views, fixed_form, in_place

__all__ = ["prepare", "prepared_by"]


def prepare(bound: BoundCall, form: Form, views: Views, call: CheckedCall) -> None:
    """Keep a prepared call in the cache, if the form was seen before and its backend prepares."""
    structure = bound.structure
    if not structure.is_known or CALLS.is_new(structure, form):
        return
    made = prepared_by(bound, form, call)
    if made is None and form.any_length:
        # Only one number of keys can be prepared for.
        CALLS.insert(structure, form, None)
        fixed = fixed_form(bound, views, form.passes)
        made = None if fixed is None else prepared_by(bound, fixed, call)
    if made is not None:
        CALLS.insert(structure, made.form, made)


def prepared_by(bound: BoundCall, form: Form, call: CheckedCall) -> PreparedCall | None:
    """What the backend of a checked call prepares for a form; None if it does not."""
    if call.ndim == 2:
        return None
    backend: Any = call.choice.backend
    if form.any_length:
        return _prepared_step(bound, form, call)
    arrays = in_place(bound._replace(leaves=call.leaves))
    made: Any = None
    if form.passes == "statistics":
        if isinstance(backend, PreparingStatistics):
            made = backend.prepare_statistics(call.problem, arrays)
    elif isinstance(backend, Preparing):
        made = backend.prepare(call.problem, form.passes == "residuals", arrays)
    if made is None:
        return None
    repeated = made.repeated() if isinstance(made, RepeatingCall) else None
    return PreparedCall(form, made, backend.name, call.choice.conditions, repeated=repeated)


def _prepared_step(bound: BoundCall, form: Form, call: CheckedCall) -> PreparedCall | None:
    """A call for any number of keys."""
    backend, problem = call.choice.backend, call.problem
    align, given = problem.operands.positions.align, bound.structure.options[2]
    # Whether a number and "start" or "end" agree depends on the lengths.
    if (type(given) is int and align is not None) or not isinstance(backend, PreparingSteps):
        return None
    arrays = in_place(bound._replace(leaves=call.leaves), is_step=True)
    from_lengths = arrays_from_lengths(problem) if bound.structure.lengths else []
    if bound.structure.lengths and not from_lengths:
        return None
    made = backend.prepare_any_length(problem, (*arrays, *from_lengths))
    if made is None:
        return None
    length_keys: list[Hashable] = []
    for tree in bound.structure.variants:
        add_length_keys(tree, problem.spec.kv_len, length_keys)
    every_length, repeated = not length_keys, None
    if every_length and isinstance(made, RepeatingSteps):
        repeated = made.repeated_arrays(align == "end")
    step = StepForm(align == "end", len(from_lengths), every_length)
    return PreparedCall(form, made, backend.name, call.choice.conditions, step, repeated)
