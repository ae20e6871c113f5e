"""Initial weights and activations of Mamba, Mamba-2 and gated delta networks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.errors import UnsupportedError
from qkv.mechanisms.base.modules.loading import require_attributes

__all__ = ["GATE_OF_ONE", "HALVING", "STEP_OF_ONE", "initial_state_space_weight", "require_silu"]

GATE_OF_ONE = 1.2784645427610738
"""The number whose silu is 1, for examples whose gate is open."""

STEP_OF_ONE = math.log(math.e - 1)
"""The number whose softplus is 1, for examples with time steps of 1."""

HALVING = math.log(math.log(2))
"""The A_log with which a state halves in a time step of 1."""


def initial_state_space_weight(
    name: str, shape: tuple[int, ...], rng: np.random.Generator
) -> NDArray[Any] | None:
    """The initial A_log, D, norm.weight or dt_bias; None for other names.

    A is -1, -2, ... along the last axis. Time steps, the softplus of dt_bias, are spread from
    0.001 to 0.1 on a logarithmic scale.

    Notes
    -----
    Source: Gu and Dao, "Mamba", arXiv 2312.00752, section 3.6.

    Examples
    --------
    >>> initial_state_space_weight("D", (2,), np.random.default_rng(0))
    array([1., 1.])
    """
    if name == "A_log":
        return np.broadcast_to(np.log(np.arange(1, shape[-1] + 1)), shape).copy()
    if name in ("D", "norm.weight"):
        return np.ones(shape)
    if name == "dt_bias":
        return np.log(np.expm1(np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape))))
    return None


def require_silu(module: Any) -> None:
    """Refuse a module of transformers whose activation is another than silu.

    Raises
    ------
    ArgumentError
        It has no activation.
    UnsupportedError
        Naming the activation.
    """
    require_attributes(module, ("activation",))
    if module.activation not in ("silu", "swish"):
        raise UnsupportedError(
            f"the module has the activation {shown(module.activation)}; qkv computes silu.",
            action="Use a module with hidden_act='silu'.",
        )
