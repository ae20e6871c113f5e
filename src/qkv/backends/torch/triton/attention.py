"""Attention of tensors by kernels of Triton, with gradients; what they lack, torch computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.backends.torch.attention import TensorAttention, hides_values, needs_derivatives
from qkv.backends.torch.fused import attend_fused, is_fused
from qkv.backends.torch.rotation import rotated
from qkv.backends.torch.triton.launches import Launches
from qkv.partial import Partial
from qkv.problem.spec import Problem

__all__ = ["attend"]

_OPERANDS = "query", "key", "value"


def attend(problem: Problem, *, lse: bool) -> Partial:
    """Output and lse, sinks included; differentiable any number of times.

    torch's own kernel computes what it can: plain and aligned causal calls without lse.
    """
    spec, given = problem.spec, problem.operands.device_arrays
    tensors = [given[name] for name in _OPERANDS]
    if not lse and is_fused(problem):
        return attend_fused(problem)
    if not _has_kernels(problem):
        return TensorAttention(problem).attend()
    batched = [
        t.expand(*spec.batch_shape, *t.shape[-3:]).reshape(spec.batch_size, *t.shape[-3:])
        for t in tensors
    ]
    if spec.rotation is not None:  # Rounding rotated rows to 16 bits would show in scores.
        sides = zip(batched[:2], ("q", "kv"), strict=True)
        batched[:2] = [rotated(problem, t.float(), side) for t, side in sides]
    inputs = dict(zip(_OPERANDS, batched, strict=True)) | _arrays_of_variants(problem)
    flat = Problem(
        replace(spec, batch_shape=(spec.batch_size,)), replace(problem.operands, angles=None)
    )
    call = Launches.of(flat, tensors[0].device)
    if needs_derivatives(*inputs.values()):
        out, rows = _Attention.apply(call, tuple(inputs), *inputs.values())
    else:
        found = call.forward(inputs, tensors[2].dtype)
        out, rows = found.out, found.lse
    leading = spec.batch_shape
    found_lse: Any = rows.reshape(*leading, *rows.shape[1:]) if lse else np.empty(0)
    return Partial(out.reshape(*leading, *out.shape[1:]), found_lse)


def _has_kernels(problem: Problem) -> bool:
    """Whether kernels compute this, and not operations of torch.

    These serve where torch traces or transforms a call, and where there is nothing to add up.
    """
    spec, given = problem.spec, problem.operands.device_arrays
    if hides_values(*(given[name] for name in _OPERANDS)):
        return False
    sizes = spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len, spec.head_dim
    return 0 not in (*sizes, spec.v_head_dim)


def _arrays_of_variants(problem: Problem) -> dict[str, Tensor]:
    """Sinks, one for each head, and tables that have gradients."""
    operands = problem.operands
    arrays = {
        name: tensor
        for name, tensor in operands.device_arrays.items()
        if name not in (*_OPERANDS, "sinks") and tensor.requires_grad
    }
    if operands.sinks is not None:
        query = operands.device_arrays["query"]
        sinks = operands.device_arrays.get("sinks")
        if sinks is None:
            sinks = torch.from_numpy(np.array(operands.sinks, np.float32))
        sinks = sinks.to(query.device, torch.float32)
        arrays["sinks"] = sinks.expand(problem.spec.num_heads).contiguous()
    return arrays


class _Attention(torch.autograd.Function):
    """Output and lse, with gradients of query, key, value and sinks by kernels.

    Gradients of tables, and those that torch will differentiate once more, are computed by
    operations of torch.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Launches, names: tuple[str, ...], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        # The backward pass subtracts what the output says from other products, so that rounding it
        # to 16 bits would show.
        found = call.forward(dict(zip(names, tensors, strict=True)), torch.float32)
        ctx.call, ctx.names = call, names
        ctx.save_for_backward(*tensors, found.out, found.row_max, found.row_sum)
        ctx.set_materialize_grads(False)
        return found.out, found.lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        *tensors, out, row_max, row_sum = ctx.saved_tensors
        inputs = dict(zip(ctx.names, tensors, strict=True))
        wanted = [n for n, w in zip(ctx.names, ctx.needs_input_grad[2:], strict=True) if w]
        if grad_out is None and grad_lse is None:
            return None, None, *(None for _ in inputs)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if torch.is_grad_enabled() or not {*wanted} <= {*_OPERANDS, "sinks"}:
            found = _by_operations(ctx.call.problem, inputs, wanted, grad_out, grad_lse)
        else:
            grad_out = grad_out.to(inputs["value"].dtype).contiguous()
            delta = ctx.call.deltas(out, grad_out, grad_lse)
            found = ctx.call.backward(inputs, grad_out, row_max, row_sum, delta)
            if "sinks" in wanted:
                largest = inputs["sinks"].clamp(max=torch.finfo(torch.float32).max)[:, None]
                share = torch.exp(largest - row_max) / row_sum
                found["sinks"] = -(share * delta).sum((0, 2))
        return None, None, *(found.get(name) for name in ctx.names)


def _by_operations(
    problem: Problem,
    inputs: Mapping[str, Tensor],
    wanted: Sequence[str],
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> dict[str, Tensor | None]:
    """Gradients of the inputs that are wanted, which torch can differentiate again."""
    again = torch.is_grad_enabled()
    if not again:
        inputs = {n: t.detach().requires_grad_(n in wanted) for n, t in inputs.items()}
    arrays = dict(problem.operands.device_arrays) | dict(inputs)
    held = replace(problem.operands, device_arrays=arrays)
    with torch.enable_grad():
        found: Any = TensorAttention(replace(problem, operands=held)).attend()
    outputs, cotangents = [found.out], [grad_out]
    if grad_lse is not None:
        outputs, cotangents = [found.out, found.lse], [grad_out, grad_lse]
    gradients = torch.autograd.grad(
        outputs, [inputs[name] for name in wanted], cotangents, create_graph=again,
        allow_unused=True,
    )  # fmt: skip
    return dict(zip(wanted, gradients, strict=True))
