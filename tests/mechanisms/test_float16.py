"""Mechanisms in float16 beside modules of transformers and functions of torch in float64.

Squares of numbers above 255 overflow in float16, and so do products of what a layer holds between
its input and its output, although both are far from the largest number, 65504.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from float64_mode import Float64Mode
from transformers import (
    DiffLlamaConfig,
    Mamba2Config,
    MambaConfig,
    Qwen3NextConfig,
    RwkvConfig,
)
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

from qkv.mechanisms import (
    MECHANISMS,
    RWKV4,
    RWKV6,
    Additive,
    Differential,
    GatedDelta,
    Hard,
    Linear,
    Linformer,
    Mamba,
    Mamba2,
    Performer,
)
from qkv.mechanisms.base.arrays.normalization import (
    l2_norm,
    layer_norm,
    rms_norm,
    weighted_rms_norm,
)
from qkv.mechanisms.base.modules.comparing import decoder_run
from qkv.variants import RoPE

WIDTH, N = 24, 11
F = torch.nn.functional

NORMS: list[tuple[str, Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = [
    ("rms_norm", lambda x: rms_norm(x, 1e-5), lambda x: F.rms_norm(x, (8,), eps=1e-5)),
    (
        "weighted_rms_norm",
        lambda x: weighted_rms_norm(x, x[0] * 0 + 3, 1e-5),
        lambda x: F.rms_norm(x, (8,), torch.full((8,), 3.0).double(), 1e-5),
    ),
    ("layer_norm", lambda x: layer_norm(x, 1e-5), lambda x: F.layer_norm(x, (8,), eps=1e-5)),
    (
        "l2_norm",
        lambda x: l2_norm(x, 1e-6),
        lambda x: x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2 + 1e-6).sqrt(),
    ),
]


@pytest.mark.parametrize("size", [3e-3, 1.0, 1000.0, 20000.0])
@pytest.mark.parametrize(("ours", "theirs"), [n[1:] for n in NORMS], ids=[n[0] for n in NORMS])
def test_norms_of_any_size(
    ours: Callable[[Any], Any], theirs: Callable[[torch.Tensor], torch.Tensor], size: float
) -> None:
    """Squares of large numbers overflow, and squares of small ones vanish."""
    rng = np.random.default_rng(0)
    x = torch.tensor(size * rng.normal(size=(5, 8))).half()
    if size > 10000:
        x = x.clip(-60000, 60000)
    expected = theirs(x.double())
    for found in (ours(x), torch.tensor(ours(x.numpy()))):
        assert found.dtype is torch.float16
        torch.testing.assert_close(found.double(), expected, rtol=2**-10, atol=2**-20)


def diff_llama() -> Any:
    config = DiffLlamaConfig(
        hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    config._attn_implementation = "eager"
    return DiffLlamaAttention(config, layer_idx=2)


def mamba2() -> Any:
    sizes: dict[str, Any] = {
        "num_heads": 6,
        "head_dim": 8,
        "state_size": 10,
        "n_groups": 2,
        "chunk_size": 16,
    }
    return Mamba2Mixer(Mamba2Config(hidden_size=WIDTH, num_hidden_layers=1, **sizes), 0)


def gated_delta() -> Any:
    config = Qwen3NextConfig(
        hidden_size=WIDTH, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=6, num_hidden_layers=1,
    )  # fmt: skip
    return Qwen3NextGatedDeltaNet(config, 0)


def mamba() -> Any:
    return MambaMixer(MambaConfig(hidden_size=WIDTH, state_size=8, num_hidden_layers=1), 0)


def rwkv4() -> Any:
    return RwkvSelfAttention(RwkvConfig(hidden_size=WIDTH, num_hidden_layers=1))


MODULES: list[tuple[Any, Callable[[], Any], Callable[[Any, torch.Tensor], Any], float]] = [
    (Differential, diff_llama, decoder_run(RoPE(base=500.0), None), 3000.0),
    # Their exponents, and the fifth power of x in the output of Mamba, are sooner out of range.
    (RWKV4, rwkv4, lambda module, x: module(x), 30.0),
    (Mamba, mamba, lambda module, x: module(x), 8.0),
    (Mamba2, mamba2, lambda module, x: module(x), 3000.0),
    (GatedDelta, gated_delta, lambda module, x: module(x), 3000.0),
]


@pytest.mark.parametrize("part", [1.0, 0.1, 1e-3])
@pytest.mark.parametrize(
    ("cls", "make", "run", "largest"), MODULES, ids=[m[0].name for m in MODULES]
)
def test_large_inputs_in_float16(
    cls: Any,
    make: Callable[[], Any],
    run: Callable[[Any, torch.Tensor], Any],
    largest: float,
    part: float,
) -> None:
    torch.manual_seed(0)
    module = make().double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        parameter.data = parameter.data.half().double()
    x = (part * largest * torch.randn(2, N, WIDTH)).half()
    with Float64Mode(), torch.no_grad():
        expected = run(module, x.double())
    expected = expected[0] if isinstance(expected, tuple) else expected
    mechanism = cls.from_transformers(module)
    size = float(expected.abs().max())
    for found in (mechanism(x), torch.tensor(mechanism(x.numpy()))):
        assert found.dtype is torch.float16
        difference = float((found.double() - expected).abs().max())
        assert difference <= 0.02 * size


STATEFUL: dict[str, Callable[..., Any]] = {
    "linear": lambda **more: Linear(WIDTH, 4, causal=True, **more),
    "performer": lambda **more: Performer(WIDTH, 4, causal=True, num_features=32, **more),
    "rwkv6": lambda **more: RWKV6(WIDTH, 4, **more),
}


@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("name", STATEFUL)
def test_states_hold_what_float16_does_not(name: str, size: float) -> None:
    """Results are near those in float64, which other tests compare with the definition."""
    make = STATEFUL[name]
    weights = {key: np.float16(w) for key, w in make().weights.items()}
    layer = make(weights=weights)
    size = min(size, 8.0) if name == "performer" else size  # Its weights vanish beyond.
    x: Any = np.float16(size * np.random.default_rng(0).normal(size=(2, N, WIDTH)))
    expected = make(weights={k: np.float64(w) for k, w in weights.items()})(np.float64(x))
    outputs, state = [], None
    for t in range(N):
        out, state = layer.step(x[:, t : t + 1], state)
        outputs.append(out)
    tensors = layer(torch.tensor(x))
    assert tensors.dtype is torch.float16
    for found in (layer(x), np.concatenate(outputs, 1), tensors.numpy()):
        assert found.dtype == np.float16
        assert abs(np.float64(found) - expected).max() <= 0.02 * abs(expected).max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(MECHANISMS))
@pytest.mark.one_in(2)
def test_the_dtype_of_x_is_kept_and_explained(name: str, dtype: torch.dtype) -> None:
    mechanism = MECHANISMS[name].example()
    arguments = [torch.tensor(a).to(dtype) for a in MECHANISMS[name].example_arguments()]
    out = mechanism(*arguments)
    assert out.dtype is mechanism.token_mixing(*arguments).dtype is dtype
    keywords: dict[str, Any] = dict(zip(("key", "value"), arguments[1:], strict=False))
    found = mechanism.explain(arguments[0], **keywords).steps[-1].lines[-1].value
    np.testing.assert_allclose(found, out[0].double(), rtol=0.03, atol=0.03)


def test_the_best_keys_of_large_rows() -> None:
    """Scores above 65504 would be infinite in float16, and all of them the best."""
    rows: Any = np.float16(400 * np.random.default_rng(0).normal(size=(3, 6, 4)))
    q, k, v = rows
    scores = q.astype(float) @ k.astype(float).T
    assert abs(scores).max() > 65504
    best = scores.argmax(1)
    np.testing.assert_array_equal(Hard(4)(q, k, v), v[best])
    np.testing.assert_array_equal(Hard(4)(*map(torch.tensor, (q, k, v))).numpy(), v[best])


def test_additive_attention_to_many_keys() -> None:
    """A sum of 70,000 terms is infinite in float16."""
    y = np.ones((70_000, 4), np.float16)
    layer = Additive(4, hidden_dim=4)
    np.testing.assert_array_equal(layer(y[:1], y, y), np.ones((1, 4)))
    np.testing.assert_allclose(np.sum(layer.token_mixing(y[:1], y), dtype=float), 1, rtol=0.01)


def test_arrays_of_bfloat16_stay_such() -> None:
    x = np.ones((5, 8), ml_dtypes.bfloat16)
    assert Additive(8)(x).dtype == x.dtype
    assert Linformer(8, 2, max_len=9, num_mixtures=3).token_mixing(x).dtype == x.dtype
