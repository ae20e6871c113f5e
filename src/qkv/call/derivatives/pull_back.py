"""Gradients from kept residuals: prepared if a like backward pass was seen before, else checked.

A backward pass is like an earlier one if the calls are (`qkv.call.attend`), nothing but query, key
and value is to have gradients, and residuals and cotangents have the same types, shapes and
strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.call.binding.bound import BoundCall
from qkv.call.binding.variant_arrays import without_repeats
from qkv.call.checked import CheckedCall, check_call
from qkv.call.derivatives.gradients import Gradients, backward_inputs, gradients_of
from qkv.call.repeated.cache import CALLS, Form, PreparedCall
from qkv.call.repeated.forms import Views, fixed_form, heads_first, in_place
from qkv.call.repeated.numpy_runs import run_on_arrays
from qkv.call.repeated.preparing import prepare
from qkv.partial import Partial

__all__ = ["Residuals", "prepared_gradients", "pull_back"]

Array = NDArray[Any]


class Residuals(NamedTuple):
    """The residuals of the forward pass, as NumPy arrays in the layout of the call.

    `out` is the output, or what it was before it was rounded to 16 bits. `lse_rest` is the rounding
    error of lse. If it is None or holds NaN, it is not known, and the forward pass is run again.
    """

    out: Array
    lse: Array
    lse_rest: Array | None

    def as_partial(self, call: CheckedCall) -> Partial:
        """The residuals in the shapes of the call's problem."""
        out = call.plain(self.out)
        shape = (*call.problem.spec.batch_shape, call.problem.spec.num_heads, out.shape[-2])
        rest = self.lse_rest
        known = rest is not None and not np.isnan(rest).any()
        return Partial(
            out,
            self.lse.reshape(shape),
            rest.reshape(shape) if known and rest is not None else None,
        )


def pull_back(
    bound: BoundCall,
    residuals: Residuals,
    grad_out: Any,
    grad_lse: Any = None,
    wrt: Sequence[Any] = (),
    given: Sequence[Any] | None = None,
) -> Gradients:
    """Gradients as `pullback(grad_out, grad_lse, wrt)` of `qkv.vjp` gives them.

    Parameters
    ----------
    bound : BoundCall
    residuals : Residuals
        Of its forward pass.
    grad_out, grad_lse : array
        Like output and lse; None for lse is zeros.
    wrt : sequence
        Variants whose own arrays are to have gradients: those of `given`, or numbers of leaves.
    given : sequence, optional
        The variants as the caller gave them.
    """
    form = known = None
    blhd = bound.structure.layout == "blhd"
    views = None if wrt else heads_first(bound)
    if views is not None:
        form = _form(bound, views, residuals, grad_out, grad_lse)
        known = _known(bound, form)
    if known is not None and views is not None:
        known.used = CALLS.clock
        out, cotangent = (_swap_heads(a) if blhd else a for a in (residuals.out, grad_out))
        read = *views, out, residuals.lse, residuals.lse_rest, cotangent, grad_lse
        gradients_of_heads = run_on_arrays(known.prepared, read, in_place(bound))
        if gradients_of_heads is not None:
            query, key, value = (
                np.ascontiguousarray(_swap_heads(a)) if blhd else a for a in gradients_of_heads
            )
            return Gradients(query, key, value)
        CALLS.discard(bound.structure, known)
    call = check_call(without_repeats(bound, wrt, given), given, backward=True)
    partial = residuals.as_partial(call)
    shapes = [leaf.shape for leaf in call.leaves[:3]]
    gradients = gradients_of(call, partial, shapes, grad_out, grad_lse, wrt)
    if form is not None and views is not None and CALLS.is_repeated(bound.structure, form):
        operands = call.problem.operands
        # Gradients of broadcast operands have other shapes.
        if (operands.query.shape, operands.key.shape, operands.value.shape) == tuple(
            [view.shape for view in views]
        ):
            inputs = backward_inputs(call, partial, grad_out, grad_lse)
            prepare(bound, form, views, call, inputs)
    return gradients


def prepared_gradients(
    bound: BoundCall, residuals: Residuals, grad_out: Array, grad_lse: Array
) -> PreparedCall | None:
    """What is prepared for gradients like these, of query, key and value alone."""
    views = heads_first(bound)
    if views is None:
        return None
    return _known(bound, _form(bound, views, residuals, grad_out, grad_lse))


def _known(bound: BoundCall, form: Form | None) -> PreparedCall | None:
    entry = CALLS.entry(bound.structure)
    return None if entry is None or form is None else entry.calls.get(form)


def _form(
    bound: BoundCall, views: Views, residuals: Residuals, grad_out: Any, grad_lse: Any
) -> Form | None:
    arrays = (*residuals, grad_out, grad_lse)
    if not all(a is None or type(a) is np.ndarray for a in arrays):
        return None
    layouts = [None if a is None else (a.dtype, a.shape, a.strides) for a in arrays]
    return fixed_form(bound, views, "gradients", *layouts)


def _swap_heads(array: Array) -> Array:
    """The array with heads and rows swapped."""
    return array.swapaxes(-3, -2)
