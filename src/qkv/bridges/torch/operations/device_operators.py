"""The operators of calls on devices whose arrays are read where the graph runs.

    qkv::device_attention            out, lse
    qkv::device_attention_backward   gradients of query, key, value and of some of the arrays

A call on a device is made of torch's own operations, which torch traces by itself. Lengths, ids of
segments, slopes or a seed are read before the first of them, and have no values while torch traces:
so the whole call becomes one operator. lse has no entries unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qkv.arrays.torch_arrays import is_readable, keeps_values
from qkv.backends.torch.attention import is_transformed
from qkv.bridges.torch.operations.groups import numbers, of_inputs
from qkv.bridges.torch.operations.operators import check_shapes, empty_dense, empty_results
from qkv.call.binding.bound import BoundCall, Structure
from qkv.call.device_call import check_device_call, read_by_lower

__all__ = ["attend_later", "device_attention", "reads_later"]


def reads_later(bound: BoundCall) -> bool:
    """Whether torch traces a call whose arrays are to be read before its operations."""
    # Transforms would need rules of the operator, and ONNX does not know it.
    if is_transformed() or torch.onnx.is_in_onnx_export():
        return False
    # A trace would take values that it can read as constants of later calls.
    is_kept = keeps_values()
    arrays = [bound.leaves[n] for n in read_by_lower(bound)]
    return any(isinstance(a, Tensor) and (is_kept or not is_readable(a)) for a in arrays)


def attend_later(bound: BoundCall, *, lse: bool) -> tuple[Tensor, Tensor | None]:
    """Output and, if wanted, lse of a call that is one node of a graph."""
    query, key, value, *arrays = bound.leaves
    out, rows = device_attention(query, key, value, arrays, bound.structure.text, lse)
    return out, rows if lse else None


@torch.library.custom_op("qkv::device_attention", mutates_args=())
def device_attention(
    query: Tensor, key: Tensor, value: Tensor, arrays: Sequence[Tensor], structure: str, lse: bool
) -> tuple[Tensor, Tensor]:
    """Output and lse of a call, computed where its tensors are."""
    bound = BoundCall(Structure.from_text(structure), (query, key, value, *arrays))
    out, rows = check_device_call(bound).attend(lse=lse)
    return out.contiguous(), rows.contiguous() if lse else out.new_empty(0)


@device_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, _: Any, structure: str, lse: bool
) -> tuple[Tensor, Tensor]:
    layout = Structure.from_text(structure).layout
    check_shapes(query, key, value, layout)
    out, rows = empty_results(query, key, value, layout)
    return out, rows if lse else out.new_empty(0)


@torch.library.custom_op("qkv::device_attention_backward", mutates_args=())
def device_attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arrays: Sequence[Tensor],
    grad_out: Tensor,
    grad_lse: Tensor,
    structure: str,
    lse: bool,
    wanted: Sequence[int],
) -> list[Tensor]:
    """Gradients of query, key, value and the wanted arrays; the call is computed again."""
    leaves = [t.detach() for t in (query, key, value, *arrays)]
    inputs = [leaves[n].requires_grad_() for n in (0, 1, 2, *(3 + n for n in wanted))]
    with _differentiating():
        bound = BoundCall(Structure.from_text(structure), tuple(leaves))
        results = check_device_call(bound).attend(lse=lse)
        cotangents = (grad_out, grad_lse) if lse else (grad_out,)
        gradients = torch.autograd.grad(
            results[: len(cotangents)], inputs, cotangents, materialize_grads=True
        )
    return [gradient.contiguous() for gradient in gradients]


@contextmanager
def _differentiating() -> Iterator[None]:
    """torch takes down what is computed here, as it does not inside an operator otherwise."""
    keys, included = torch._C.DispatchKeySet, torch._C._dispatch_tls_local_include_set()
    autograd = keys(torch._C.DispatchKey.AutogradFunctionality)
    excluded = torch._C._dispatch_tls_local_exclude_set() - autograd
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@device_attention_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, arrays: Any, *given: Any) -> list[Tensor]:
    *_, wanted = given
    return [empty_dense(t) for t in (query, key, value, *(arrays[n] for n in wanted))]


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, arrays, ctx.structure, ctx.lse = inputs
    ctx.save_for_backward(query, key, value, *arrays)


def _gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
    inputs = ctx.saved_tensors
    query, key, value, *arrays = inputs
    needed = ctx.needs_input_grad[3] if arrays else ()
    wanted = numbers(needed)
    gradients = device_attention_backward(
        query, key, value, arrays, grad_out, grad_lse, ctx.structure, ctx.lse, wanted
    )
    first, second, third, *rest = of_inputs(gradients, wanted, inputs)
    return first, second, third, rest, None, None


device_attention.register_autograd(_gradients, setup_context=_save_for_backward)
