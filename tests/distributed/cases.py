"""Variants of a whole sequence, and what each means in a dense float64 matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import qkv

LENGTH, HEADS, KV_HEADS, DIM, V_DIM, BATCH = 72, 8, 4, 16, 12, 2


class Case(NamedTuple):
    """`variants(*arrays)` is what a call is given, `dense(scores, *arrays)` what that means."""

    arrays: tuple[torch.Tensor, ...]
    variants: Callable[..., tuple[Any, ...]]
    dense: Callable[..., torch.Tensor]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


_I = torch.arange(LENGTH)[:, None]
_J = torch.arange(LENGTH)[None, :]
_IDS = torch.repeat_interleave(torch.arange(4), torch.tensor([11, 30, 1, 30]))
_MASK = draw(5, LENGTH, LENGTH) < 0.3
_MASK[7] = False
NOTHING = float("-inf")


def _kept(scores: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~allowed, NOTHING)


def _causal(scores: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return _kept(scores, _J <= _I)


def _alibi(scores: torch.Tensor) -> torch.Tensor:
    slopes = torch.tensor([2.0 ** -(h + 1) for h in range(HEADS)], dtype=torch.float64)
    return _causal(scores - slopes[:, None, None] * (_I - _J).abs())


def _t5(scores: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Raffel et al. (2020): half of the buckets exact, the others logarithmic, on both sides."""
    distance = (_J - _I).abs()
    far = 8 + (torch.log(distance.clamp(min=1) / 8) / torch.log(torch.tensor(8.0)) * 8).long()
    bucket = torch.where(distance < 8, distance, far.clamp(max=15)) + 16 * (_J > _I)
    return scores + table[bucket].permute(2, 0, 1)


def _segments(scores: torch.Tensor) -> torch.Tensor:
    return _kept(scores, (_J <= _I) & (_IDS[:, None] == _IDS[None, :]))


def _window_of_heads(score: Any, _batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
    return score - 0.1 * abs(q_pos - kv_pos) * (head + 1)


class _EveryThird:
    """A mask of the user's own."""

    def lower(self, builder: Any) -> None:
        builder.mask((builder.q_pos + builder.kv_pos) % 3 != 1)


CASES: dict[str, Case] = {
    "plain": Case((), lambda: (), lambda s: s),
    "causal": Case((), lambda: (qkv.Causal(),), _causal),
    "window": Case(
        (), lambda: (qkv.SlidingWindow(9, 0),), lambda s: _kept(s, (_J <= _I) & (_I - _J <= 9))
    ),
    "packed documents": Case((), lambda: (qkv.Segments(_IDS), qkv.Causal()), _segments),
    "prefix": Case(
        (), lambda: (qkv.Causal() | qkv.Prefix(20),), lambda s: _kept(s, (_J <= _I) | (_J < 20))
    ),
    "alibi": Case((), lambda: (qkv.Causal(), qkv.ALiBi()), _alibi),
    "t5": Case(
        (draw(1, 32, HEADS),),
        lambda t: (qkv.RelativeBias(t, bidirectional=True, max_distance=64),),
        _t5,
    ),
    "sinks": Case((draw(2, HEADS),), lambda s: (qkv.Causal(), qkv.Sinks(s)), _causal),
    "softcap": Case((), lambda: (qkv.Softcap(3.0),), lambda s: 3.0 * torch.tanh(s / 3.0)),
    "bias": Case(
        (draw(3, HEADS, LENGTH, LENGTH),),
        lambda b: (qkv.Causal(), qkv.Bias(b)),
        lambda s, b: _causal(s + b),
    ),
    "mask array": Case((), lambda: (_MASK,), lambda s: _kept(s, _MASK)),
    "own mask": Case((), lambda: (_EveryThird(),), lambda s: _kept(s, (_I + _J) % 3 != 1)),
    "own score": Case(
        (),
        lambda: (qkv.ScoreMod(_window_of_heads),),
        lambda s: s - 0.1 * (_I - _J).abs() * torch.arange(1, HEADS + 1)[:, None, None],
    ),
}


def operands() -> tuple[torch.Tensor, ...]:
    """Query, key, value, and cotangents of output and lse."""
    shapes = (
        (BATCH, HEADS, LENGTH, DIM), (BATCH, KV_HEADS, LENGTH, DIM),
        (BATCH, KV_HEADS, LENGTH, V_DIM), (BATCH, HEADS, LENGTH, V_DIM), (BATCH, HEADS, LENGTH),
    )  # fmt: skip
    return tuple(draw(10 + n, *shape) for n, shape in enumerate(shapes))


def expected(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and lse, and gradients of query, key, value and the case's arrays, in float64."""
    case = CASES[name]
    query, key, value, d_out, d_lse = operands()
    inputs = [t.clone().requires_grad_() for t in (query, key, value, *case.arrays)]
    q, k, v, *arrays = inputs
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = case.dense(q @ k.mT / DIM**0.5, *arrays)
    if name == "sinks":
        column = arrays[0][:, None, None].expand(BATCH, HEADS, LENGTH, 1)
        scores = torch.cat([scores, column], dim=-1)
        v = torch.cat([v, torch.zeros_like(v[..., :1, :])], dim=-2)
    empty = torch.isneginf(scores).all(-1)
    safe = scores.masked_fill(empty[..., None], 0.0)
    lse = torch.logsumexp(safe, -1).masked_fill(empty, NOTHING)
    out = (torch.softmax(safe, -1) @ v).masked_fill(empty[..., None], 0.0)
    finite = torch.where(empty, 0.0, torch.where(empty, 0.0, lse))
    total = (out * d_out).sum() + (finite * d_lse).sum()
    gradients = torch.autograd.grad(total, inputs)
    return [out.detach(), lse.detach()], list(gradients)
