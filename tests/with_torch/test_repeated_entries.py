"""Gradients of arrays that were expanded, of scales for each head, and of what has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import qkv
from qkv.torch import scaled_dot_product_attention

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

GENERATOR = torch.Generator().manual_seed(1)
Q, K, V = (torch.randn(2, 4, 7, 8, generator=GENERATOR, dtype=torch.float64) for _ in range(3))
BIAS = torch.randn(4, 1, 7, generator=GENERATOR, dtype=torch.float64)


def expanded(attend: Any, bias: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = attend(Q, K, V, attn_mask=bias.expand(2, 4, 7, 7)).square().sum()
    return loss


OF_TORCH = torch.nn.functional.scaled_dot_product_attention
RIGHT = torch.func.grad(lambda b: expanded(OF_TORCH, b))(BIAS)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_an_expanded_bias_has_the_sum(compiled: bool) -> None:
    bias = BIAS.clone().requires_grad_()

    def loss(bias: torch.Tensor) -> torch.Tensor:
        return expanded(scaled_dot_product_attention, bias)

    function = torch.compile(loss, backend="aot_eager") if compiled else loss
    assert_close(torch.autograd.grad(function(bias), bias)[0], RIGHT)


def test_an_expanded_bias_in_transformations() -> None:
    def loss(bias: torch.Tensor) -> torch.Tensor:
        return expanded(scaled_dot_product_attention, bias)

    assert_close(torch.func.grad(loss)(BIAS), RIGHT)
    assert_close(torch.func.jvp(loss, (BIAS,), (BIAS,))[1], (RIGHT * BIAS).sum())
    both = torch.stack([BIAS, BIAS])
    assert_close(torch.vmap(torch.func.grad(loss))(both), torch.stack([RIGHT, RIGHT]))


def test_each_entry_of_a_broadcast_array_has_its_gradient() -> None:
    arrays = [t.numpy() for t in (Q, K, V)]
    bias = np.broadcast_to(BIAS.numpy(), (2, 4, 7, 7))
    variant = qkv.Bias(bias)
    out, pullback = qkv.vjp(*arrays, variant)
    found = pullback(2 * out, wrt=[variant]).of(variant)
    whole = BIAS.expand(2, 4, 7, 7).clone()
    right = torch.func.grad(lambda b: OF_TORCH(Q, K, V, attn_mask=b).square().sum())(whole)
    np.testing.assert_allclose(found, right.numpy(), atol=1e-12)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_a_scale_is_learned(shape: tuple[int, ...]) -> None:
    scale = torch.full(shape, 0.4, dtype=torch.float64) + torch.rand(shape, generator=GENERATOR)
    found = []
    for function in (
        lambda s: qkv.attention(Q, K, V, scale=s),
        lambda s: (s.reshape(-1, 1, 1) * (Q @ K.mT)).softmax(-1) @ V,
    ):
        leaf = scale.clone().requires_grad_()
        out = function(leaf)
        found.append((out, torch.autograd.grad(out.square().sum(), leaf)[0]))
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


def test_frequencies_that_are_to_be_learned_are_refused_at_once() -> None:
    rope = qkv.RoPE(inv_freq=torch.rand(4, dtype=torch.float64, requires_grad=True))
    with pytest.raises(qkv.UnsupportedError, match=r"gradient of inv_freq of RoPE"):
        qkv.attention(Q, K, V, rope)


@pytest.mark.slow
def test_a_learned_soft_cap_is_refused_and_its_advice_learns_it() -> None:
    """Such a soft cap once trained nothing, in silence."""
    cap = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    with pytest.raises(qkv.UnsupportedError, match=r"gradient of cap of Softcap(.|\n)*ScoreMod"):
        qkv.attention(Q, K, V, qkv.Softcap(cap))
    advised = qkv.ScoreMod(lambda s, b, h, i, j: cap * np.tanh(s / cap))
    found = torch.autograd.grad(qkv.attention(Q, K, V, advised, scale=1.0).square().sum(), cap)
    scores = cap * torch.tanh(Q @ K.mT / cap)
    right = torch.autograd.grad((scores.softmax(-1) @ V).square().sum(), cap)
    assert_close(found, right)


def test_a_scale_for_each_head_where_sizes_change() -> None:
    """The number of heads is a variable of the second graph, and the size of the scale is none."""
    scale = torch.rand(4)

    def function(rows, layout):
        return qkv.attention(rows, rows, rows, scale=scale, layout=layout)

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for rows, layout in ((torch.randn(2, 4, 5, 8), "bhld"), (torch.randn(2, 5, 4, 8), "blhd")):
        assert torch.equal(compiled(rows, layout), function(rows, layout))
