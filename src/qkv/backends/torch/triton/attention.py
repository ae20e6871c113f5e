"""Attention of tensors by kernels of Triton, with gradients; what they lack, torch computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.backends.torch.attention import TensorAttention, hides_values, needs_derivatives
from qkv.backends.torch.rotation import rotated
from qkv.backends.torch.triton.launches import Launches
from qkv.partial import Partial
from qkv.problem.spec import Problem

__all__ = ["attend"]

_OPERANDS = "query", "key", "value"


def attend(problem: Problem, *, lse: bool) -> Partial:
    """Output and lse, sinks included; differentiable any number of times."""
    spec, given = problem.spec, problem.operands.device_arrays
    tensors = [given[name] for name in _OPERANDS]
    if not _has_kernels(problem):
        return TensorAttention(problem).attend()
    batched = [
        t.expand(*spec.batch_shape, *t.shape[-3:]).reshape(spec.batch_size, *t.shape[-3:])
        for t in tensors
    ]
    if spec.rotation is not None:  # Rounding rotated rows to 16 bits would show in scores.
        sides = zip(batched[:2], ("q", "kv"), strict=True)
        batched[:2] = [rotated(problem, t.float(), side) for t, side in sides]
    sinks = _sinks(problem, tensors[0].device)
    flat = Problem(
        replace(spec, batch_shape=(spec.batch_size,)), replace(problem.operands, angles=None)
    )
    call = Launches.of(flat, tensors[0].device)
    if needs_derivatives(*batched, *([] if sinks is None else [sinks])):
        out, rows = _Attention.apply(call, sinks, *batched)
    else:
        found = call.forward(batched, sinks, batched[2].dtype)
        out, rows = found.out, found.lse
    leading = spec.batch_shape
    found_lse: Any = rows.reshape(*leading, *rows.shape[1:]) if lse else np.empty(0)
    return Partial(out.reshape(*leading, *out.shape[1:]), found_lse)


def _has_kernels(problem: Problem) -> bool:
    """Whether kernels compute this, and not operations of torch.

    These serve where torch traces or transforms a call, where there is nothing to add up, and where
    tables have gradients.
    """
    spec, given = problem.spec, problem.operands.device_arrays
    if hides_values(*(given[name] for name in _OPERANDS)):
        return False
    sizes = spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len, spec.head_dim
    if 0 in (*sizes, spec.v_head_dim):
        return False
    tables = [t for name, t in given.items() if name not in (*_OPERANDS, "sinks")]
    return not needs_derivatives(*tables)


def _sinks(problem: Problem, device: torch.device) -> Tensor | None:
    operands = problem.operands
    if operands.sinks is None:
        return None
    sinks = operands.device_arrays.get("sinks")
    if sinks is None:
        sinks = torch.from_numpy(np.array(operands.sinks, np.float32))
    return sinks.to(device, torch.float32).expand(problem.spec.num_heads).contiguous()


class _Attention(torch.autograd.Function):
    """Output and lse, and their gradients by kernels.

    Where torch will differentiate these once more, they are computed by its own operations.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Launches, sinks: Tensor | None, *operands: Tensor
    ) -> tuple[Tensor, Tensor]:
        # The backward pass subtracts what the output says from other products, so that rounding it
        # to 16 bits would show.
        found = call.forward(operands, sinks, torch.float32)
        ctx.call = call
        ctx.save_for_backward(
            sinks, *operands, found.out, found.row_max, found.row_sum
        )
        ctx.set_materialize_grads(False)
        return found.out, found.lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        sinks, query, key, value, out, row_max, row_sum = ctx.saved_tensors
        operands = query, key, value
        if grad_out is None and grad_lse is None:
            return None, None, None, None, None
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if torch.is_grad_enabled():
            return None, *_again(ctx, sinks, operands, grad_out, grad_lse)
        delta = (out * grad_out).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[1]:
            largest = sinks.clamp(max=torch.finfo(torch.float32).max)[:, None]
            of_sinks = -(torch.exp(largest - row_max) / row_sum * delta).sum((0, 2))
        found = ctx.call.backward(operands, grad_out, row_max, row_sum, delta)
        return None, of_sinks, *found


def _again(
    ctx: Any,
    sinks: Tensor | None,
    operands: Sequence[Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> list[Tensor | None]:
    """Gradients of sinks, query, key and value, as operations that torch can differentiate."""
    problem: Problem = ctx.call.problem
    arrays = dict(problem.operands.device_arrays) | dict(zip(_OPERANDS, operands, strict=True))
    if sinks is not None:
        arrays["sinks"] = sinks
    held = replace(problem.operands, device_arrays=arrays)
    found: Any = TensorAttention(replace(problem, operands=held)).attend()
    outputs, cotangents = [found.out], [grad_out]
    if grad_lse is not None:
        outputs, cotangents = [found.out, found.lse], [grad_out, grad_lse]
    wanted = ctx.needs_input_grad[1:]
    inputs = [t for t, w in zip((sinks, *operands), wanted, strict=True) if w]
    gradients = iter(
        torch.autograd.grad(outputs, inputs, cotangents, create_graph=True, allow_unused=True)
    )
    return [next(gradients) if w else None for w in wanted]
