"""Forward and backward passes of tensors, as `qkv.call` has prepared them for NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from qkv.backends import Prepared, conditions
from qkv.bridges.torch.openmp import on_torch_threads
from qkv.bridges.torch.operands import LIBRARY, view_of
from qkv.bridges.torch.repeated.guards import Guard, gradient_guard
from qkv.call.binding.bound import BoundCall, Structure
from qkv.call.derivatives.pull_back import Residuals, prepared_gradients
from qkv.call.repeated.cache import PreparedCall
from qkv.call.repeated.numpy_runs import run_on_arrays

__all__ = ["PreparedPasses"]

_MOST_ATTEMPTS = 4
"""How often the backward pass of one call is prepared. Afterwards cotangents of other layouts are
looked up each time, which is slower, but no slower than preparing for each."""


class PreparedPasses:
    """Both passes of calls like one of plain tensors; what calls share is for the caller to check.

    The backward pass is prepared when the first gradients have been computed.

    Parameters
    ----------
    structure : Structure
    leaves : int
        How many leaves the call has.
    forward : Prepared
    """

    def __init__(self, structure: Structure, leaves: int, forward: Prepared) -> None:
        self._forward = forward
        self._backward: tuple[Guard, PreparedCall] | None = None
        self._attempts = 0
        self._rows_first = structure.layout == "blhd"
        self._in_place = [n for n in range(3, leaves) if n not in structure.by_value]

    def attend(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """The results of `operators.compute_attention`; None if that has to be called."""
        query, key, value = map(self._view, inputs[:3])
        with on_torch_threads():
            read = query, key, value
            results = run_on_arrays(self._forward, read, self._arrays(inputs))
        if results is None:
            return None
        out, lse, *more = results
        rest = more[0] if more else np.full_like(lse, np.nan)
        unrounded = more[1] if len(more) > 1 else None
        result = self._tensor(out)
        kept = result if unrounded is None else self._tensor(unrounded)
        return result, LIBRARY.restore(lse), LIBRARY.restore(rest), kept

    def gradients(
        self, results: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[Tensor] | None:
        """Gradients of query, key and value; None if they have to be looked up.

        The parameters are the groups of `qkv.bridges.torch.operations.functions`.
        """
        known = self._backward
        # What autograd keeps may outlast what it was prepared for.
        if known is None or known[1].conditions != conditions():
            return None
        if not known[0](*self._read(results, cotangents, inputs)):
            return None
        query, key, value = map(self._view, inputs[:3])
        out, lse, rest = self._view(results[0]), view_of(results[1]), view_of(results[2])
        grad_out, grad_lse = self._view(cotangents[0]), view_of(cotangents[1])
        arrays = self._arrays(inputs)
        with on_torch_threads():
            read = query, key, value, out, lse, rest, grad_out, grad_lse
            computed = run_on_arrays(known[1].prepared, read, arrays)
        return None if computed is None else list(map(self._tensor, computed))

    def prepare_gradients(
        self,
        results: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        inputs: Sequence[Tensor],
        structure: Structure,
    ) -> None:
        """Keep the backward pass if it was prepared for as one of NumPy arrays."""
        read = self._read(results, cotangents, inputs)
        if self._attempts == _MOST_ATTEMPTS or len(set(map(id, read))) < len(read):
            return
        self._attempts += 1
        bound = BoundCall(structure, tuple(map(view_of, inputs)))
        kept, given = map(view_of, results), map(view_of, cotangents)
        ready = prepared_gradients(bound, Residuals(*kept), *given)
        if ready is not None:
            self._backward = gradient_guard(*read), ready

    def _read(self, *groups: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the backward pass reads in place."""
        results, cotangents, inputs = groups
        return [*results, *cotangents, *inputs[:3], *[inputs[n] for n in self._in_place]]

    def _arrays(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        return tuple([view_of(inputs[n]) for n in self._in_place])

    def _view(self, tensor: Tensor) -> Any:
        """An array with heads before rows."""
        array = view_of(tensor)
        return array.swapaxes(-3, -2) if self._rows_first else array

    def _tensor(self, array: Any) -> Tensor:
        """The tensor of an array with heads before rows."""
        own = np.ascontiguousarray(array.swapaxes(-3, -2)) if self._rows_first else array
        tensor: Tensor = LIBRARY.restore(own)
        return tensor
