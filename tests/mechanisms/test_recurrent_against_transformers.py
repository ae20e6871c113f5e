"""Recurrent mechanisms against the modules of transformers, weights and gradients included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from float64_mode import Float64Mode
from transformers import Mamba2Config, MambaConfig, Qwen3NextConfig, RwkvConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

from qkv.errors import UnsupportedError
from qkv.mechanisms import RWKV4, GatedDelta, Mamba, Mamba2

WIDTH, N = 24, 70

close = np.testing.assert_allclose


def rwkv4() -> Any:
    return RwkvSelfAttention(
        RwkvConfig(hidden_size=WIDTH, attention_hidden_size=32, num_hidden_layers=1)
    )


def mamba(**options: Any) -> Any:
    return MambaMixer(
        MambaConfig(hidden_size=WIDTH, state_size=8, num_hidden_layers=1, **options), 0
    )


def mamba_with_other_biases() -> Any:
    return mamba(use_bias=True, use_conv_bias=False, time_step_rank=3, conv_kernel=3)


def mamba2(**options: Any) -> Any:
    sizes = {"num_heads": 6, "head_dim": 8, "state_size": 10, "n_groups": 2, "chunk_size": 16}
    return Mamba2Mixer(Mamba2Config(hidden_size=WIDTH, num_hidden_layers=1, **(sizes | options)), 0)


def mamba2_with_other_options() -> Any:
    return mamba2(n_groups=1, use_bias=True, use_conv_bias=False, time_step_limit=(0.3, 0.8))


def gated_delta(num_key_heads: int = 2) -> Any:
    config = Qwen3NextConfig(
        hidden_size=WIDTH,
        linear_num_value_heads=4,
        linear_num_key_heads=num_key_heads,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        num_hidden_layers=1,
    )
    return Qwen3NextGatedDeltaNet(config, 0)


def gated_delta_with_as_many_key_heads() -> Any:
    return gated_delta(4)


CASES = [
    (RWKV4, rwkv4),
    (Mamba, mamba),
    (Mamba, mamba_with_other_biases),
    (Mamba2, mamba2),
    (Mamba2, mamba2_with_other_options),
    (GatedDelta, gated_delta),
    (GatedDelta, gated_delta_with_as_many_key_heads),
]


def with_weights(make: Callable[[], Any]) -> Any:
    """A module in float64 with random weights in every parameter."""
    torch.manual_seed(0)
    module = make().double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return module


def output_of(module: Any, x: torch.Tensor) -> torch.Tensor:
    with Float64Mode():
        found = module(x)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize(("cls", "make"), CASES)
def test_outputs_agree(cls: Any, make: Callable[[], Any]) -> None:
    module = with_weights(make)
    x = torch.randn(2, N, WIDTH, dtype=torch.float64)
    right = output_of(module, x).detach().numpy()
    mechanism = cls.from_transformers(module)
    close(mechanism(x.numpy()), right, rtol=1e-10, atol=1e-10)
    close(mechanism(x).detach().numpy(), right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("cls", "make"), CASES)
def test_gradients_agree(cls: Any, make: Callable[[], Any]) -> None:
    module = with_weights(make)
    mechanism = cls.from_transformers(module)
    for weight in mechanism.weights.values():
        weight.requires_grad_()
    x = torch.randn(2, N, WIDTH, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(2, N, WIDTH, dtype=torch.float64)
    named = dict(module.named_parameters())
    assert named.keys() == mechanism.weights.keys()
    right = torch.autograd.grad(output_of(module, x), [x, *named.values()], cotangent)
    ours = [x, *(mechanism.weights[name] for name in named)]
    found = torch.autograd.grad(mechanism(x), ours, cotangent)
    for name, ours, theirs in zip(["x", *named], found, right, strict=True):
        close(ours, theirs, rtol=1e-9, atol=1e-10 * float(theirs.abs().max()), err_msg=name)


@pytest.mark.parametrize(("cls", "make"), CASES)
def test_float32_is_as_close_to_float64_as_theirs(cls: Any, make: Callable[[], Any]) -> None:
    module = with_weights(make)
    x = torch.randn(2, N, WIDTH, dtype=torch.float64)
    right = output_of(module, x).detach()
    mechanism = cls.from_transformers(module)
    ours = (mechanism(x.float()) - right).abs().median()
    with torch.no_grad():
        theirs = module.float()(x.float())
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    # The median: normalising a row that is almost zero magnifies whatever rounding it holds.
    assert ours <= 2 * (theirs - right).abs().median()


def test_modules_with_another_activation_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="gelu"):
        Mamba.from_transformers(mamba(hidden_act="gelu"))
