"""Attention as operations of torch, a block of queries at a time; torch differentiates them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from qkv.arrays.torch_arrays import TorchArrays
from qkv.backends.torch import PAIRS
from qkv.backends.torch.expressions import TensorEvaluation, with_chosen_pieces
from qkv.backends.torch.rotation import rotated
from qkv.partial import Partial
from qkv.problem.language.expressions import SCORE, TRUE
from qkv.problem.philox import dropout_factors
from qkv.problem.spec import Problem

__all__ = [
    "TensorAttention", "are_finite", "hides_values", "is_transformed", "needs_derivatives",
    "softmax",
]  # fmt: skip

_are_transforms_active = torch._C._are_functorch_transforms_active


def hides_values(*tensors: Tensor) -> bool:
    """Whether values cannot be read, because torch traces or transforms, or tensors are meta."""
    return (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or is_transformed()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
        or torch._C._get_tracing_state() is not None
        or any(t.is_meta for t in tensors)
    )


def needs_derivatives(*tensors: Tensor) -> bool:
    """Whether torch will ask for derivatives."""
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return wanted or is_transformed()


def is_transformed() -> bool:
    """Whether a transform of `torch.func`, or forward mode, is at work."""
    return _are_transforms_active() or forward_ad._current_level >= 0


class TensorAttention:
    """One problem, with tensors for its operands and tables.

    Blocks of queries are recomputed in the backward pass, so that memory stays O(n). `torch.func`
    and forward mode do not support that, so there the weights are kept.
    """

    def __init__(self, problem: Problem) -> None:
        spec, operands = problem.spec, problem.operands
        tensors = operands.device_arrays
        query = tensors["query"]
        self.problem, self.device = problem, query.device
        self.hides_values = hides_values(query, tensors["key"], tensors["value"])
        self.dtype = torch.float64 if spec.dtype == "float64" else torch.float32
        self.query, self.key, self.value = (
            tensors[name]
            .expand(*spec.batch_shape, *tensors[name].shape[-3:])
            .reshape(spec.batch_size, *tensors[name].shape[-3:])
            .to(self.dtype)
            for name in ("query", "key", "value")
        )
        self.query = rotated(problem, self.query, "q")
        self.key = rotated(problem, self.key, "kv")
        differentiated = self.hides_values or torch.is_grad_enabled()
        self.score = with_chosen_pieces(spec.score) if differentiated else spec.score
        self.tables = {
            name: self._table(array, tensors.get(name)) for name, array in operands.tables.items()
        }
        self.sinks = None
        if operands.sinks is not None:
            sinks = tensors.get("sinks")
            sinks = self._to_device(operands.sinks) if sinks is None else sinks
            self.sinks = sinks.to(self.device, self.dtype).expand(spec.num_heads)

    def attend(self) -> Partial:
        """Output and lse, sinks included, in the type of computation."""
        spec = self.problem.spec
        step = max(1, PAIRS // max(1, spec.batch_size * spec.num_heads * spec.kv_len))
        parts = []
        for start in range(0, max(spec.q_len, 1), step):
            stop = min(start + step, spec.q_len)
            # torch.func and compilers do not support checkpoints; they hold the weights instead.
            if torch.is_grad_enabled() and not self.hides_values:
                parts.append(checkpoint(self._attend_block, start, stop, use_reentrant=False))
            else:
                parts.append(self._attend_block(start, stop))
        outs, rows = zip(*parts, strict=True)
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len)
        out = torch.cat(outs, -2).reshape(*shape, spec.v_head_dim)
        # `Partial` is typed for NumPy arrays, but carries tensors here.
        lse: Any = torch.cat(rows, -1).reshape(shape)
        return Partial(out, lse)  # type: ignore[arg-type]

    def _attend_block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Output and lse of some queries, `(batch, num_heads, queries, ...)`."""
        spec, scale = self.problem.spec, self.problem.operands.scale
        groups = spec.num_kv_heads, spec.group_size
        grouped = self.query[:, :, start:stop].unflatten(1, groups)
        key = self.key[:, :, None]
        # Transforms cannot follow functions of one's own.
        finite = _finite if self.hides_values else _FiniteRows.apply
        scaled = (finite(grouped) @ finite(key).mT * scale).flatten(1, 2)
        is_finite = not self.hides_values and are_finite(grouped, key)
        if not is_finite:
            # Products that are not finite have the gradient of those of `_finite` rows, because in
            # their own gradient 0 * NaN would reach forbidden pairs.
            raw = (grouped.detach() @ key.detach().mT * scale).flatten(1, 2)
            raw_with_gradient = raw + (scaled - scaled.detach())
            scaled_or_nan = torch.where(raw.isnan(), raw, scaled)
            scaled = torch.where(
                scaled.isfinite() & ~raw.isfinite(), raw_with_gradient, scaled_or_nan
            )
        indices = self._indices(start, stop)
        allowed = TensorEvaluation(indices, self.tables, self.dtype).value(spec.mask)

        def modified(*, select: bool) -> Tensor:
            """Scores after the mods; with `select`, forbidden pairs have no part in gradients.

            What the mods read is 0 there, and has the gradient 0 whatever that of a mod would be,
            since 0 * NaN is NaN.
            """
            variables = indices | {"score": torch.where(allowed, scaled, 0.0) if select else scaled}
            differentiated = self.hides_values or torch.is_grad_enabled()
            evaluation = TensorEvaluation(
                variables, self.tables, self.dtype, allowed if select and differentiated else None
            )
            return evaluation.value(self.score).to(self.dtype)  # A score mod may give integers.

        scores = scaled
        if spec.score != SCORE:
            with torch.set_grad_enabled(torch.is_grad_enabled() and is_finite):
                scores = modified(select=is_finite and spec.mask != TRUE)
            # A mod forbids pairs too, by a score of -inf.
            forbidden = torch.isneginf(scores) & allowed
            if not is_finite or (torch.is_grad_enabled() and bool(forbidden.any())):
                allowed = allowed & ~forbidden
                scores = modified(select=True)
        scores = torch.where(allowed, scores, -torch.inf).expand(scaled.shape)
        weights, lse = softmax(scores, self.sinks)
        if self.problem.operands.dropout is not None:
            weights = weights * self._dropout_factors(start, stop)
        return self._weighted_values(weights, ~torch.isneginf(scores)), lse

    def _ranges(self, start: int, stop: int) -> dict[str, tuple[int, int]]:
        """The first index and the end along each of four axes, for some queries."""
        spec = self.problem.spec
        return {
            "batch": (0, spec.batch_size), "head": (0, spec.num_heads),
            "q_index": (start, stop), "kv_index": (0, spec.kv_len),
        }  # fmt: skip

    def _indices(self, start: int, stop: int) -> dict[str, Tensor]:
        return {
            name: torch.arange(first, last, device=self.device).view(
                *(-1 if n == axis else 1 for n in range(4))
            )
            for axis, (name, (first, last)) in enumerate(self._ranges(start, stop).items())
        }

    def _weighted_values(self, weights: Tensor, allowed: Tensor) -> Tensor:
        value = self.value.repeat_interleave(self.problem.spec.group_size, 1)
        finite = value.isfinite()
        if not self.hides_values:
            out: Tensor = _WeightedSum.apply(weights, allowed, _finite(value))
        else:  # Transforms cannot follow that.
            out = weights @ _finite(value)
            return out + _non_finite_sums(weights, allowed, value)
        for j in torch.nonzero(~finite.all(-1).all(0).all(0)).flatten().tolist():
            rest = torch.where(finite[:, :, j], 0.0, value[:, :, j])[:, :, None]
            share = weights[..., j, None] * rest
            out = out + torch.where(allowed[..., j, None], share, 0.0)
        return out

    def _dropout_factors(self, start: int, stop: int) -> Tensor:
        dropout = self.problem.operands.dropout
        assert dropout is not None
        ranges = self._ranges(start, stop)
        # Tensors of indices may have no memory here, as in torch.func and on meta.
        counters = dict(zip(ranges, np.ix_(*(np.arange(*r) for r in ranges.values())), strict=True))
        compute_dtype = np.dtype(np.float64 if self.dtype is torch.float64 else np.float32)
        return self._to_device(dropout_factors(dropout, **counters, dtype=compute_dtype))

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        restored: Tensor = TorchArrays().restore(np.array(array, order="C"))
        return restored.to(self.device)

    def _table(self, array: NDArray[Any], leaf: Tensor | None) -> Tensor:
        if leaf is None:
            tensor = self._to_device(array)
            return tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        padded = leaf.reshape((1,) * (array.ndim - leaf.ndim) + tuple(leaf.shape))
        for axis, size in enumerate(array.shape):
            padded = padded.narrow(axis, 0, size)  # A broadcast axis is read once.
        dtype = torch.bool if padded.dtype is torch.bool else self.dtype
        return padded.to(self.device, dtype)


def _finite(rows: Tensor) -> Tensor:
    """These rows with 0 for what is not finite."""
    return torch.where(rows.isfinite(), rows, 0.0)


class _FiniteRows(torch.autograd.Function):
    """`_finite`, with the gradient of what is not finite too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return _finite(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


def are_finite(*tensors: Tensor) -> bool:
    """Whether every entry is finite; waits for a device."""
    return all(bool(t.isfinite().all()) for t in tensors)


class _WeightedSum(torch.autograd.Function):
    """`weights @ value`, where a gradient that is not finite reaches allowed pairs alone."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, allowed: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(weights, allowed, value)
        return weights @ value

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        weights, allowed, value = ctx.saved_tensors
        of_value = weights.mT @ _finite(grad_out)
        if not are_finite(grad_out):
            of_value = of_value + _non_finite_sums(weights.mT, allowed.mT, grad_out)
        return grad_out @ value.mT, None, of_value


def _non_finite_sums(weights: Tensor, allowed: Tensor, rows: Tensor) -> Tensor:
    """The NaN and infinite parts of weighted sums of rows, as constants without a gradient."""
    dtype = weights.dtype
    has_weight, has_no_weight = (
        (weights.detach() > 0).to(dtype),
        allowed & (weights.detach() == 0),
    )
    has_inf, has_negative_inf = (
        has_weight @ (rows == limit).to(dtype) > 0 for limit in (torch.inf, -torch.inf)
    )
    nan = allowed.to(dtype) @ rows.isnan().to(dtype) > 0
    nan = (
        nan | (has_no_weight.to(dtype) @ rows.isinf().to(dtype) > 0) | (has_inf & has_negative_inf)
    )
    infinite = torch.where(has_inf, torch.inf, torch.where(has_negative_inf, -torch.inf, 0.0))
    return torch.where(nan, torch.nan, infinite).to(dtype)


def softmax(scores: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights and lse of each row; an empty one has weights 0 and lse -inf, with gradient 0.

    Weights are not `exp(scores - lse)`, because the rounding of lse shows where scores are as large
    as -1e4.
    """
    kv_len, forbidden = scores.shape[-1], torch.isneginf(scores)
    if sinks is not None:
        # A sink of infinity takes all weight, as the largest number does; inf - inf would be NaN.
        largest = torch.where(torch.isposinf(sinks), torch.finfo(sinks.dtype).max, sinks)
        column = largest[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    if scores.shape[-1] == 0:
        return scores, scores.sum(-1) - torch.inf  # Not a constant, so that gradients are 0.
    empty = torch.isneginf(scores).all(-1)
    safe = torch.where(empty[..., None], 0.0, scores)
    weights = torch.where(forbidden, 0.0, safe.softmax(-1)[..., :kv_len])
    lse = torch.where(empty, -torch.inf, safe.logsumexp(-1))
    if sinks is not None:
        lse = lse + torch.where(torch.isposinf(sinks), torch.inf, 0.0)[:, None]
    return weights, lse
