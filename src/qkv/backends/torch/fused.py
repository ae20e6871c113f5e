"""torch's own fused kernels, where they mean exactly the same, with second derivatives.

Fused kernels multiply what a causal mask forbids by 0, so that one NaN or infinite number would
reach rows that may not see it. Such tensors go another way; to find them costs one reduction each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.backends.torch.attention import (
    TensorAttention,
    are_finite,
    hides_values,
    is_transformed,
    needs_derivatives,
)
from qkv.partial import Partial
from qkv.problem.language.expressions import TRUE, Op, Var
from qkv.problem.spec import Problem

__all__ = ["attend_fused", "is_fused"]

_CAUSAL = Op("le", "bool", (Var("kv_index"), Var("q_index")))
_LARGEST = 1e37
"""A product below this does not overflow in float32, and sums of such products do not either."""


def is_fused(problem: Problem) -> bool:
    """Whether a fused kernel of torch means the same.

    Without a mask, or with a causal one that hides nothing that is not finite. Fused kernels have
    no derivative in forward mode, and no batches of `torch.func`.
    """
    spec, given = problem.spec, problem.operands.device_arrays
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if 0 in (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len, spec.v_head_dim):
        return False
    if spec.scores or spec.rotation or spec.sinks or spec.dropout:
        return False
    differentiated = needs_derivatives(query, key, value)
    if spec.mask == TRUE:
        # A compiler differentiates the kernel by itself, once.
        compiled = torch.compiler.is_compiling() and not is_transformed()
        return not differentiated or compiled or not hides_values(query, key, value)
    if spec.mask != _CAUSAL or spec.q_len != spec.kv_len or hides_values(query, key, value):
        return False
    if not differentiated:
        return are_finite(key, value)
    of_query, of_key, of_value = _largest(query, key, value)
    scale = spec.head_dim * max(1.0, abs(problem.operands.scale))
    return _is_below_overflow(scale, of_query, of_key) and _is_below_overflow(of_value)


def attend_fused(problem: Problem) -> Partial:
    """The output alone; lse has no values."""
    call, given = _FusedCall.of(problem), problem.operands.device_arrays
    operands = [given[name] for name in ("query", "key", "value")]
    differentiated = needs_derivatives(*operands) and not torch.compiler.is_compiling()
    out: Any = _Fused.apply(call, *operands) if differentiated else call(*operands)
    return Partial(out, np.empty(0))


@dataclass(frozen=True, slots=True)
class _FusedCall:
    """A problem without its operands, which torch holds for as long as it needs them."""

    problem: Problem

    @classmethod
    def of(cls, problem: Problem) -> _FusedCall:
        return cls(replace(problem, operands=replace(problem.operands, device_arrays={})))

    @property
    def is_causal(self) -> bool:
        return self.problem.spec.mask != TRUE

    def __call__(self, *operands: Tensor) -> Tensor:
        """The output of query, key and value."""
        return torch.nn.functional.scaled_dot_product_attention(
            *self._expanded(operands),
            is_causal=self.is_causal,
            scale=self.problem.operands.scale,
            enable_gqa=self.is_grouped,
        )

    def is_safe(self, grad_out: Tensor, value: Tensor) -> bool:
        """Whether no product of a cotangent and a value overflows, and all of them are finite."""
        return _is_below_overflow(self.problem.spec.v_head_dim, *_largest(grad_out, value))

    @property
    def is_grouped(self) -> bool:
        return self.problem.spec.group_size > 1

    def _expanded(self, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        batch_shape = self.problem.spec.batch_shape
        query, key, value = (of.expand(*batch_shape, *of.shape[-3:]) for of in operands)
        return query, key, value

    def has_choice(self, *operands: Tensor) -> bool:
        """Whether the kernels of this call have backward passes with and without fixed bits."""
        if operands[0].device.type != "cuda":
            return False
        kernels, expanded = torch.backends.cuda, self._expanded(operands)
        called = kernels.SDPAParams(*expanded, None, 0.0, self.is_causal, self.is_grouped)
        return kernels.can_use_flash_attention(called) or kernels.can_use_efficient_attention(
            called
        )

    def differentiable(self, *operands: Tensor) -> Tensor:
        """The same of operations that torch differentiates any number of times."""
        names = ("query", "key", "value")
        arrays = dict(zip(names, operands, strict=True))
        held = replace(self.problem.operands, device_arrays=arrays)
        attended: Any = TensorAttention(replace(self.problem, operands=held)).attend().out
        out: Tensor = attended.to(operands[0].dtype)
        return out


class _Fused(torch.autograd.Function):
    """A fused kernel and its backward pass, with the same bits on every run.

    The backward pass computes the output again, so that nothing is held but the operands. It uses
    operations of torch in place of the kernel where torch will differentiate it once more, and for
    a causal call whose cotangent is not finite.
    """

    @staticmethod
    def forward(ctx: Any, call: _FusedCall, *operands: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*operands)
        return call(*operands)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        call, operands, wanted = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        again = torch.is_grad_enabled()
        fused = not again and (not call.is_causal or call.is_safe(grad_out, operands[2]))
        if fused:
            operands = [t.detach().requires_grad_(w) for t, w in zip(operands, wanted, strict=True)]
        inputs = [t for t, w in zip(operands, wanted, strict=True) if w]
        with torch.enable_grad(), _deterministic(fused and call.has_choice(*operands)):
            out = call(*operands) if fused else call.differentiable(*operands)
            found = iter(torch.autograd.grad(out, inputs, grad_out, create_graph=again))
        return None, *(next(found) if w else None for w in wanted)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Kernels whose bits are the same on every run, where torch has a choice.

    The backward pass of flash adds gradients of queries in any order otherwise, and the one of
    cuDNN always does. `torch.use_deterministic_algorithms` would import torch's compiler. Products
    of matrices have no such choice, and would raise.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if wanted:
        torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        if wanted:
            torch._C._set_deterministic_algorithms(before, warn_only=warn_only)


def _largest(*tensors: Tensor) -> list[float]:
    """The largest magnitude in each, not finite if an entry is not; waits for a device once."""
    ends = [of.double() for t in tensors for of in torch.aminmax(t.detach())]
    magnitudes: list[float] = torch.stack(ends).abs().view(-1, 2).amax(-1).tolist()
    return magnitudes


def _is_below_overflow(*factors: float) -> bool:
    """Whether a product is too small to overflow, and each factor finite."""
    return all(map(math.isfinite, factors)) and math.prod(factors) < _LARGEST
