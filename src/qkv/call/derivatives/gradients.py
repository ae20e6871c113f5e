"""Gradients of a checked call, from what its forward pass left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Differentiable
from qkv.call.binding.variant_arrays import (
    as_given,
    briefly,
    by_origin,
    check_given,
    made,
    wanted,
)
from qkv.call.checked import CheckedCall
from qkv.call.derivatives.cotangents import cotangent_of_lse, cotangent_of_out, like_operand
from qkv.errors import ArgumentError
from qkv.partial import Partial
from qkv.problem.backward import BackwardInputs, OperandGradients, shares_of_sinks
from qkv.problem.spec import Origin

__all__ = ["Gradients", "arranged", "backward_inputs", "gradient_of_sinks", "gradients_of"]

Array = NDArray[Any]


class Gradients:
    """Gradients of one call: of `query`, `key`, `value`, and `of(variant)`.

    Attributes
    ----------
    query, key, value : array
        With the library, dtype, shape and layout of the operand; where its leading dimensions were
        broadcast, `sum` over them.

    Parameters
    ----------
    of_variants : sequence of (origin, array)
        What `of` looks up; `qkv.vjp` fills it in.
    call : CheckedCall, optional
        Knows variants as they were given.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.eye(2)
    >>> out, pullback = qkv.vjp(x, x, x, qkv.Sinks(0.0))
    >>> pullback(np.ones_like(out)).value.round(3)
    array([[0.752, 0.752],
           [0.752, 0.752]])
    """

    def __init__(
        self,
        query: Any,
        key: Any,
        value: Any,
        of_variants: Sequence[tuple[Origin, Any]] = (),
        call: CheckedCall | None = None,
    ) -> None:
        self.query = query
        self.key = key
        self.value = value
        self._of_variants = tuple(of_variants)
        self._call = call

    def of(self, variant: Any, array: Any = None) -> Any:
        """The gradient of a variant's own array, with its shape and dtype.

        Parameters
        ----------
        variant : Variant or array
            One that `wrt` named.
        array : array, optional
            Which of the variant's arrays, if a `ScoreMod` reads several.

        Raises
        ------
        ArgumentError
            If there is no gradient of the variant, or it has several arrays and none is named.
        """
        known = variant
        if self._call is not None:
            known, array = self._call.named(variant, array)
        own = [(o, g) for o, g in self._of_variants if made(o, known)]
        if self._call is not None and own:
            check_given(known, [o for o, _ in own], self._call.arrays_of(known, array))
            if array is not None and any(o.holds(array) for o, _ in own):
                held = [g for o, g in own if self._call.holds(o, variant, array)]
                parts = [g.reshape(array.shape) for g in held]
                nothing = self._call.library.restore(np.zeros(array.shape, array.dtype))
                return sum(parts[1:], start=parts[0]) if parts else nothing
        if array is not None:
            own = []
        if len(own) == 1:
            return own[0][1]
        if not own:
            raise ArgumentError(
                f"there is no gradient of {briefly(variant if array is None else array)}.",
                action="Name its variant in the pullback: pullback(grad_out, wrt=[variant]).",
            )
        raise ArgumentError(
            f"{briefly(variant)} has {len(own)} arrays.",
            [(f"array {n}", f"{o.array.dtype} {o.array.shape}") for n, (o, _) in enumerate(own)],
            "Say which: gradients.of(variant, array), with the very array that it reads.",
        )


def gradients_of(
    call: CheckedCall,
    partial: Partial,
    shapes: Sequence[tuple[int, ...]],
    grad_out: Any,
    grad_lse: Any,
    wrt: Iterable[Any],
) -> Gradients:
    """Gradients for cotangents of output and lse.

    Parameters
    ----------
    call : CheckedCall
        Whose backend computes gradients.
    partial : Partial
        What its forward pass left, sinks included.
    shapes : sequence of tuple of int
        Of query, key and value as they were given.
    grad_out, grad_lse : array
        Like output and lse; None for lse is zeros.
    wrt : iterable
        Variants of the call, as they were given, whose own arrays are to have gradients.
    """
    problem = call.problem
    inputs = backward_inputs(call, partial, grad_out, grad_lse)
    tables, sinks = wanted(problem, [call.named(variant)[0] for variant in wrt])
    inputs = replace(inputs, tables=frozenset(name for name, _ in tables))
    backend = call.choice.backend
    # The check of the call refused backends without a backward pass.
    assert isinstance(backend, Differentiable)
    gradients = backend.backward(problem, inputs)
    own = by_origin([(origin, gradients.tables[name]) for name, origin in tables])
    if sinks is not None:
        assert problem.operands.sinks is not None
        own.append((sinks, gradient_of_sinks(problem.operands.sinks, inputs)))
    return arranged(call, gradients, shapes, own)


def arranged(
    call: CheckedCall,
    gradients: OperandGradients,
    shapes: Sequence[tuple[int, ...]],
    of_variants: Sequence[tuple[Origin, Array]],
) -> Gradients:
    """Gradients in the shapes, layout and library of the call."""
    query, key, value = (
        like_operand(call, gradient, shape)
        for gradient, shape in zip(
            (gradients.query, gradients.key, gradients.value), shapes, strict=True
        )
    )
    restored = [(origin, call.library.restore(as_given(origin, g))) for origin, g in of_variants]
    return Gradients(query, key, value, restored, call)


def backward_inputs(
    call: CheckedCall, partial: Partial, grad_out: Any, grad_lse: Any
) -> BackwardInputs:
    """The inputs of a backward pass, without requested tables."""
    cotangent = cotangent_of_out(call, partial.out.shape, grad_out)
    of_lse = cotangent_of_lse(call, partial.lse.shape, partial.lse.dtype, grad_lse)
    return BackwardInputs(partial.out, partial.lse, cotangent, of_lse, lse_rest=partial.lse_rest)


def gradient_of_sinks(sinks: Array, inputs: BackwardInputs) -> Array:
    """`d sink[h] = -sum_i exp(sink[h] - lse[i]) * delta[i]`: a key of value 0 in every row."""
    with np.errstate(all="ignore"):
        along = inputs.out.astype(np.float64) * inputs.grad_out.astype(np.float64)
        delta = along.sum(axis=-1) - inputs.grad_lse
        shares = shares_of_sinks(sinks[:, None], inputs.lse) * delta
        total = -shares.sum(axis=-1)
    by_head: Array = total.reshape(math.prod(total.shape[:-1]), len(sinks)).sum(axis=0)
    return by_head
