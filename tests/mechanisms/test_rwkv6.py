"""RWKV-6 against the time mixing of its authors, written as a loop over tokens in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from qkv.errors import ArgumentError
from qkv.mechanisms import RWKV6

WIDTH, HEADS, HEAD_DIM, N = 24, 3, 8, 70


def weights() -> dict[str, torch.Tensor]:
    """Random weights under the names of the authors' code, all of which take gradients."""
    generator = torch.Generator().manual_seed(0)
    mechanism = RWKV6(WIDTH, HEADS, mix_rank=5, decay_rank=6)
    return {
        name: (0.5 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        for name, weight in mechanism.weights.items()
    }


def time_mixing(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Equations 14 to 20 of the paper, with the parameter names of the authors' code."""
    batch, n, _ = x.shape
    rows = []
    state = torch.zeros(batch, HEADS, HEAD_DIM, HEAD_DIM, dtype=x.dtype)
    last = torch.zeros_like(x[:, 0])
    for t in range(n):
        now = x[:, t]
        delta = last - now
        mixed = torch.tanh((now + delta * w["time_maa_x"][0, 0]) @ w["time_maa_w1"])
        corrections = [
            part @ up for part, up in zip(mixed.chunk(5, dim=-1), w["time_maa_w2"], strict=True)
        ]
        x_w, x_k, x_v, x_r, x_g = (
            now + delta * (w[f"time_maa_{side}"][0, 0] + correction)
            for side, correction in zip("wkvrg", corrections, strict=True)
        )
        r, k, v = (
            (row @ w[f"{name}.weight"].T).reshape(batch, HEADS, HEAD_DIM)
            for name, row in (("receptance", x_r), ("key", x_k), ("value", x_v))
        )
        gate = torch.nn.functional.silu(x_g @ w["gate.weight"].T)
        exponent = w["time_decay"][0, 0] + torch.tanh(x_w @ w["time_decay_w1"]) @ w["time_decay_w2"]
        decay = torch.exp(-torch.exp(exponent)).reshape(batch, HEADS, HEAD_DIM, 1)
        new = k[..., :, None] * v[..., None, :]
        out = (r[..., None, :] @ (state + w["time_faaaa"][..., None] * new))[..., 0, :]
        state = decay * state + new
        flat = torch.nn.functional.group_norm(
            out.reshape(batch, -1), HEADS, w["ln_x.weight"], w["ln_x.bias"], eps=64e-5
        )
        rows.append((flat * gate) @ w["output.weight"].T)
        last = now
    return torch.stack(rows, dim=1)


@pytest.fixture
def x() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, N, WIDTH, generator=generator, dtype=torch.float64)


def test_outputs_agree(x: torch.Tensor) -> None:
    given = weights()
    right = time_mixing(given, x).numpy()
    mechanism = RWKV6(WIDTH, HEADS, mix_rank=5, decay_rank=6, weights=given)
    np.testing.assert_allclose(mechanism(x.numpy()), right, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(mechanism(x), right, rtol=1e-10, atol=1e-10)


def test_gradients_agree(x: torch.Tensor) -> None:
    given = {name: weight.requires_grad_() for name, weight in weights().items()}
    mechanism = RWKV6(WIDTH, HEADS, mix_rank=5, decay_rank=6, weights=given)
    inputs = [x.requires_grad_(), *given.values()]
    cotangent = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).reshape(x.shape)
    right = torch.autograd.grad(time_mixing(given, x), inputs, cotangent)
    found = torch.autograd.grad(mechanism(x), inputs, cotangent)
    for name, ours, theirs in zip(["x", *given], found, right, strict=True):
        scale = float(theirs.abs().max())
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-10 * scale, err_msg=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "num_heads=5"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"mix_rank": 0}, "mix_rank=0"),
        ({"weights": {}}, "time_decay"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RWKV6(WIDTH, **options)
