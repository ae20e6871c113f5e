"""Derivatives of activations, as torch and JAX take them, against the definitions in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch

from qkv.mechanisms.linear_time.recurrences import activations


def _sigmoid(x: float) -> tuple[float, float]:
    s = 1 / (1 + math.exp(-x))
    return s * (1 - s), s * (1 - s) * (1 - 2 * s)


def _silu(x: float) -> tuple[float, float]:
    s = 1 / (1 + math.exp(-x))
    first, second = _sigmoid(x)
    return s + x * first, 2 * first + x * second


DERIVATIVES = {
    "sigmoid": _sigmoid,
    "silu": _silu,
    "softplus": lambda x: (1 / (1 + math.exp(-x)), _sigmoid(x)[0]),
}
"""First and second derivative of each."""


def _by_jax(function: Callable[[Any], Any], x: float) -> tuple[float, float]:
    return float(jax.grad(function)(x)), float(jax.grad(jax.grad(function))(x))


def _by_torch(function: Callable[[Any], Any], x: float) -> tuple[float, float]:
    point = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(function(point), point, create_graph=True)
    (second,) = torch.autograd.grad(first, point)
    return first.item(), second.item()


@pytest.mark.parametrize("derivatives_of", [_by_jax, _by_torch], ids=["jax", "torch"])
@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("x", [-3.0, -0.0, 0.0, 2.0])
def test_derivatives_at_zero_and_beside_it(derivatives_of: Any, name: str, x: float) -> None:
    """Rows of zeros, as padding, and weights that start at zero meet these functions at zero."""
    found = derivatives_of(getattr(activations, name), x)
    assert found == pytest.approx(DERIVATIVES[name](x), rel=1e-6, abs=1e-7)
