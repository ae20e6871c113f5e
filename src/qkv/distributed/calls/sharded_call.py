"""One attention call on one rank, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.arrays.torch_arrays import TorchArrays
from qkv.bridges.learnable import refuse_constants, refuse_undeclared
from qkv.bridges.torch.operands import as_tensor, is_tracked, kept_tensor
from qkv.call.binding.bound import bind
from qkv.call.binding.options import OptionValues
from qkv.call.binding.variant_arrays import as_given, check_given, wanted
from qkv.call.checked import CheckedCall, check_call, views_of
from qkv.call.derivatives.gradients import gradient_of_sinks
from qkv.distributed.calls.parts import Residuals
from qkv.distributed.calls.ring import Ring
from qkv.distributed.messages.links import Links
from qkv.errors import QkvError, UnsupportedError
from qkv.problem.part import placeholder
from qkv.problem.spec import Origin

__all__ = ["ShardedCall", "VariantArrays", "attend_sharded", "whole_call"]

Array = NDArray[Any]
Tensor = torch.Tensor
_LIBRARY = TorchArrays()


@dataclass(frozen=True, slots=True)
class VariantArrays:
    """The arrays that variants hold: tensors that may have gradients, and where they are in a call.

    Attributes
    ----------
    tensors : tuple of Tensor
    places : tuple of int
        The leaf of the bound call that each is.
    others : tuple of Tensor
        Tensors without gradients, which the backward pass reads too.
    """

    tensors: tuple[Tensor, ...]
    places: tuple[int, ...]
    others: tuple[Tensor, ...]


def whole_call(
    query: Tensor,
    key: Any,
    value: Any,
    variants: Sequence[Any],
    options: OptionValues,
    sizes: tuple[int, int, int, int],
    *,
    backward: bool,
) -> tuple[CheckedCall, VariantArrays]:
    """The checked call of the whole sequence, whose query, key and value nobody holds.

    Parameters
    ----------
    query, key, value : tensor (..., heads, rows, dim)
        This rank's shards.
    sizes : (num_heads, num_kv_heads, q_len, kv_len)
        Of the whole.

    Raises
    ------
    QkvError
        If the variants do not fit the whole.
    """
    refuse_constants(variants, is_tracked)
    bound = bind(query, key, value, variants, options)
    refuse_undeclared(bound.structure, is_tracked)
    if backward and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in bound.leaves):
        bound = bound._replace(leaves=list(map(_kept, bound.leaves)))
    _, leaves = views_of(bound)
    num_heads, num_kv_heads, q_len, kv_len = sizes
    views = leaves[:3]
    shapes = (
        (*views[0].shape[:-3], num_heads, q_len, views[0].shape[-1]),
        (*views[1].shape[:-3], num_kv_heads, kv_len, views[1].shape[-1]),
        (*views[2].shape[:-3], num_kv_heads, kv_len, views[2].shape[-1]),
    )
    empty = [placeholder(shape, view.dtype) for shape, view in zip(shapes, views, strict=True)]
    try:
        call = check_call(bound._replace(leaves=(*empty, *leaves[3:])), variants, backward=backward)
    except QkvError as error:
        raise error.with_action(_LIBRARY.in_words(error.action)) from None
    own = [(n, leaf) for n, leaf in enumerate(bound.leaves) if n >= 3]
    tensors = [(n, leaf) for n, leaf in own if isinstance(leaf, Tensor) and leaf.requires_grad]
    others = [leaf for _, leaf in own if isinstance(leaf, Tensor) and not leaf.requires_grad]
    return call, VariantArrays(
        tuple(t for _, t in tensors), tuple(n for n, _ in tensors), tuple(others)
    )


def _kept(leaf: Any) -> Any:
    """A leaf whose changes torch would not notice before the backward pass, as a copy."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    return _LIBRARY.view(kept_tensor(as_tensor(leaf), leaf), "an array")


@dataclass(frozen=True, slots=True)
class ShardedCall:
    """What one rank computes of a call.

    Attributes
    ----------
    call : CheckedCall
        Of the whole sequence.
    ring : Ring
    arrays : VariantArrays
    reducing : tuple of Links
        The groups over which gradients of variants' arrays are added up.
    """

    call: CheckedCall
    ring: Ring
    arrays: VariantArrays
    reducing: tuple[Links, ...]

    @property
    def sinks(self) -> Array | None:
        """The sinks of this rank's heads; None if there are none."""
        sinks, heads = self.call.problem.operands.sinks, self.ring.parts.heads
        return None if sinks is None else sinks[heads.start : heads.stop]

    def tables(self) -> tuple[list[tuple[int, str, Origin]], list[tuple[int, Origin]]]:
        """(place, table, origin) of tables with wanted gradients, and (place, origin) of sinks."""
        tables, sinks = [], []
        for place in self.arrays.places:
            owner, array = self.call.named(place)
            of_tables, of_sinks = wanted(self.call.problem, [owner])
            origins = [o for _, o in of_tables] + ([] if of_sinks is None else [of_sinks])
            check_given(owner, origins, [array])
            tables += [(place, n, o) for n, o in of_tables if self.call.holds(o, place, array)]
            if of_sinks is not None and self.call.holds(of_sinks, place, array):
                sinks.append((place, of_sinks))
        return tables, sinks


def attend_sharded(call: ShardedCall, query: Tensor, key: Tensor, value: Tensor) -> Any:
    """Output and lse of this rank's queries, differentiable once by autograd."""
    return _Attend.apply(call, query, key, value, *call.arrays.tensors)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: ShardedCall, query: Tensor, key: Tensor, value: Tensor, *arrays: Tensor
    ) -> Any:
        backward = any(ctx.needs_input_grad)
        merged = call.ring.forward(_LIBRARY.view(query, "query"), key, value, backward=backward)
        out, lse, rest = merged.finished(call.sinks)
        ctx.call = call
        # The backward pass reads what the caller may write to.
        own = out.astype(call.call.dtype, copy=backward), lse.copy() if backward else lse
        if backward:
            # Saved as tensors, which activation checkpointing frees.
            kept = [torch.from_numpy(array) for array in (out, lse, rest)]
            ctx.save_for_backward(*kept, query, key, value, *arrays, *call.arrays.others)
        return _LIBRARY.restore(own[0]), torch.from_numpy(own[1])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
        # Read once: with activation checkpointing each reading is a new computation, or an error.
        saved = ctx.saved_tensors
        kept = tuple(tensor.numpy() for tensor in saved[:3])
        saved = saved[3 : len(saved) - len(ctx.call.arrays.others)]
        return None, *_Gradients.apply(ctx.call, kept, grad_out, grad_lse, *saved)


class _Gradients(torch.autograd.Function):
    """The gradients of a call. Who differentiates them gets an error, not a gradient of nothing."""

    @staticmethod
    def forward(
        ctx: Any, call: ShardedCall, kept: tuple[Array, Array, Array], grad_out: Tensor,
        grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor,
    ) -> Any:  # fmt: skip
        cotangents = (grad_out.contiguous(), grad_lse.contiguous())
        d_out, d_lse = (_LIBRARY.view(g, "a gradient") for g in cotangents)
        out, lse, rest = kept
        residuals = Residuals(out, lse, rest, d_out, d_lse)
        tables, sinks = call.tables()
        operands = call.call.problem.operands
        sums = {name: np.zeros(operands.tables[name].shape) for _, name, _ in tables}
        totals, d_key, d_value = call.ring.backward(
            _LIBRARY.view(query, "query"), key, value, residuals, sums
        )
        own: dict[int, Tensor] = {}
        for place, name, origin in tables:
            _add(own, place, as_given(origin, totals.tables[name]))
        for place, origin in sinks:
            _add(own, place, as_given(origin, _of_sinks(call, residuals)))
        shapes = {place: call.call.leaves[place].shape for place in call.arrays.places}
        of_arrays = [own[n].reshape(shape) if n in own else None for n, shape in shapes.items()]
        for links in call.reducing:
            of_arrays = [None if g is None else links.summed(g) for g in of_arrays]
        of_operands = [
            _LIBRARY.restore(np.asarray(g, call.call.dtype)) for g in (totals.query, d_key, d_value)
        ]
        return *of_operands, *of_arrays

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise UnsupportedError(
            "a second gradient of attention over ranks is wanted; qkv has none.",
            action="Leave out create_graph=True, or use qkv.attention, which has it, on one "
            "process.",
        )


def _add(gradients: dict[int, Tensor], place: int, gradient: Array) -> None:
    tensor = _LIBRARY.restore(np.ascontiguousarray(gradient))
    gradients[place] = gradients[place] + tensor if place in gradients else tensor


def _of_sinks(call: ShardedCall, residuals: Residuals) -> Array:
    """The gradient of all sinks, over own rows and heads."""
    assert call.sinks is not None
    inputs = residuals.inputs(slice(None), frozenset())
    total = np.zeros(call.call.problem.spec.num_heads)
    heads = call.ring.parts.heads
    total[heads.start : heads.stop] = gradient_of_sinks(call.sinks, inputs)
    return total
