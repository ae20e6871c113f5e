"""Attention as the formula is written, in PyTorch, for autograd: what gradients are held to.

Which pairs are allowed, what dropout leaves, and where rows stand comes from the oracle; everything
that has a derivative is written here again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

import qkv
from qkv.testing import Truth
from qkv.variants.scores.alibi import alibi_slopes
from qkv.variants.scores.relative_bias import relative_buckets

Tensor = torch.Tensor
Array = np.ndarray[Any, Any]

TYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}  # fmt: skip


def tensor(array: Array, dtype: Any = torch.float64) -> Tensor:
    """A leaf of the tape, exact from any NumPy type."""
    return torch.tensor(np.array(array, np.float64), dtype=dtype, requires_grad=True)


class Tape(np.lib.mixins.NDArrayOperatorsMixin):
    """A tensor on which NumPy's operators and functions are torch's, so that autograd sees them."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any) -> Tape:
        return self.__array_function__(ufunc, (), inputs, {})

    def __array_function__(self, fn: Any, types: Any, args: Any, kwargs: Any) -> Tape:
        tensors = (a.tensor if isinstance(a, Tape) else torch.as_tensor(a) for a in args)
        return Tape(getattr(torch, fn.__name__)(*tensors))


class Dense:
    """One call written out: leaves, `out` and `lse`, of `dtype`.

    `truth` is the oracle's answer for the same call. `own` maps the number of a variant to the leaf
    of its array. `order` shuffles head_dim, queries and keys: other orders of addition.
    """

    def __init__(
        self,
        query: Array,
        key: Array,
        value: Array,
        truth: Truth,
        scale: float | None,
        dtype: Any = torch.float64,
        order: int = 0,
    ) -> None:
        self.dtype, self.truth = dtype, truth
        self.leaves = [tensor(a, dtype) for a in (query, key, value)]
        self.own: dict[int, Tensor] = {}
        q, k, v = self.leaves
        lead = truth.out.shape[:-3]
        q, k, v = (t.expand(*lead, *t.shape[-3:]) for t in (q, k, v))
        groups = q.shape[-3] // max(k.shape[-3], 1)
        k, v = (t.repeat_interleave(groups, dim=-3) for t in (k, v))
        self.shape = (*q.shape[:-1], k.shape[-2])
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        for variant in truth.variants:
            if isinstance(variant, qkv.RoPE):
                q, k = (self.turn(x, variant, side) for x, side in ((q, "q_pos"), (k, "kv_pos")))
        rng = np.random.default_rng(order)
        dims, rows, keys = (
            torch.as_tensor(rng.permutation(n) if order else np.arange(n))
            for n in (q.shape[-1], q.shape[-2], k.shape[-2])
        )
        s = q[..., rows, :][..., dims] @ k[..., keys, :][..., dims].transpose(-1, -2)
        s = s[..., rows.argsort(), :][..., keys.argsort()] * scale
        for n, variant in enumerate(truth.variants):
            s = self.mod(n, variant, s)
        allowed = torch.as_tensor(truth.allowed)
        s = torch.where(allowed, s, -torch.inf)[..., rows, :][..., keys]
        weights, lse = self.softmax(s)
        factors = torch.as_tensor(truth.factors).to(dtype)[..., rows, :][..., keys]
        out = (weights * factors) @ v[..., keys, :]
        self.out, self.lse = out[..., rows.argsort(), :], lse[..., rows.argsort()]

    def softmax(self, s: Tensor) -> tuple[Tensor, Tensor]:
        for variant in self.truth.variants:
            if isinstance(variant, qkv.Sinks):
                n = self.truth.variants.index(variant)
                sink = self.own[n] = tensor(variant.values, self.dtype)
                full = sink.expand(s.shape[-3])[:, None, None].expand(*s.shape[:-1], 1)
                s = torch.cat([s, full], -1)
                return torch.softmax(s, -1)[..., :-1], torch.logsumexp(s, -1)
        # softmax of nothing is NaN forwards and backwards: such rows are given zeros first.
        empty = torch.isneginf(s).all(-1, keepdim=True)
        filled = torch.where(empty, 0.0, s)
        weights = torch.where(empty, 0.0, torch.softmax(filled, -1))
        lse = torch.where(empty[..., 0], -torch.inf, torch.logsumexp(filled, -1))
        return weights, lse

    def positions(self, side: str) -> Tensor:
        """(*batch, heads, length)."""
        found = np.array([getattr(head, side) for head in self.truth.heads])
        return torch.as_tensor(found).reshape(*self.shape[:-2], -1)

    def turn(self, x: Tensor, rope: Any, side: str) -> Tensor:
        frequencies = torch.as_tensor(rope.frequencies(x.shape[-1]))
        n = len(frequencies)
        angle = self.positions(side)[..., None] * frequencies
        first, second = np.arange(n), np.arange(n, 2 * n)
        if rope.layout == "interleaved":
            first, second = np.arange(0, 2 * n, 2), np.arange(1, 2 * n, 2)
        factor = rope.attention_factor
        cos, sin = (factor * t.to(x.dtype) for t in (angle.cos(), angle.sin()))
        a, b = x[..., first], x[..., second]
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        return torch.cat([turned[..., np.argsort([*first, *second])], x[..., 2 * n :]], -1)

    def mod(self, n: int, variant: Any, s: Tensor) -> Tensor:
        distance = self.positions("q_pos")[..., :, None] - self.positions("kv_pos")[..., None, :]
        if isinstance(variant, qkv.Bias):
            bias = self.own[n] = tensor(variant.array, self.dtype)
            return s + torch.where(torch.isneginf(bias), 0.0, bias)
        if isinstance(variant, qkv.ALiBi):
            heads = self.shape[-3]
            slopes = alibi_slopes(heads) if variant.slopes is None else variant.slopes
            self.own[n] = tensor(slopes, self.dtype)
            return s - self.own[n].expand(heads)[:, None, None] * distance.abs()
        if isinstance(variant, qkv.RelativeBias):
            table = self.own[n] = tensor(variant.table, self.dtype)
            buckets = relative_buckets(
                -distance.numpy(), len(variant.table), variant.bidirectional, variant.max_distance
            )
            return s + table[torch.as_tensor(buckets), torch.arange(self.shape[-3])[:, None, None]]
        if isinstance(variant, qkv.Softcap):
            cap = self.own[n] = tensor(variant.cap, self.dtype)
            return cap * torch.tanh(s / cap)
        if isinstance(variant, qkv.ScoreMod):
            return self.score_mod(variant, s)
        return s

    def score_mod(self, variant: Any, s: Tensor) -> Tensor:
        """One head at a time, in float64."""
        out = torch.empty_like(s)
        for head, index in zip(self.truth.heads, np.ndindex(*s.shape[:-2]), strict=True):
            q_pos, kv_pos = head.q_pos[:, None], head.kv_pos[None, :]
            found = variant.fn(Tape(s[index].double()), head.batch, head.head, q_pos, kv_pos)
            out[index] = torch.where(found.tensor.isfinite(), found.tensor, 0.0).to(s.dtype)
        return out

    def gradients(
        self, grad_out: Array, grad_lse: Array | None, own: Sequence[int] = ()
    ) -> list[Array]:
        """The gradients of query, key and value, then of arrays of some variants, in float64."""
        seen = self.out
        total = (seen * torch.as_tensor(np.array(grad_out, np.float64)).to(seen.dtype)).sum()
        if grad_lse is not None:
            finite = ~torch.isneginf(self.lse)
            lse = torch.where(finite, self.lse, 0.0)
            total = total + (lse * torch.as_tensor(grad_lse).to(seen.dtype) * finite).sum()
        wanted = [*self.leaves, *(self.own[n] for n in own)]
        found = torch.autograd.grad(total, wanted, allow_unused=True)
        return [
            np.zeros(leaf.shape) if g is None else g.double().numpy()
            for g, leaf in zip(found, wanted, strict=True)
        ]


def ulp(magnitude: float, dtype: str) -> float:
    """The unit in the last place."""
    info: Any = ml_dtypes.finfo(np.dtype(dtype) if dtype != "bfloat16" else ml_dtypes.bfloat16)
    exponent = np.floor(np.log2(max(magnitude, float(info.smallest_normal))))
    return float(info.eps) * float(2.0**exponent)
