"""Variants that are made inside of a function that torch compiles, as one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import qkv
import qkv.torch

GENERATOR = torch.Generator().manual_seed(0)
QUERY = torch.randn(1, 2, 6, 8, generator=GENERATOR, dtype=torch.float64)
LOWER = torch.ones(6, 6).bool().tril()

VARIANTS: dict[str, Callable[[], Any]] = {
    "Causal": lambda: qkv.Causal(),
    "SlidingWindow": lambda: qkv.SlidingWindow(2, 0),
    "KeyLengths": lambda: qkv.KeyLengths([4]),
    "KeyLengths tensor": lambda: qkv.KeyLengths(torch.tensor([4])),
    "Segments": lambda: qkv.Segments([0, 0, 0, 1, 1, 1]),
    "Prefix": lambda: qkv.Prefix(3),
    "GlobalTokens": lambda: qkv.GlobalTokens([0, 2]),
    "Strided": lambda: qkv.Strided(2),
    "BlockSparse": lambda: qkv.BlockSparse(torch.ones(3, 3).bool().tril(), 2, 2),
    "RandomBlocks": lambda: qkv.RandomBlocks(2, 1, seed=0),
    "Mask": lambda: qkv.Mask(LOWER),
    "both": lambda: qkv.Causal() & qkv.SlidingWindow(2, 0),
    "either": lambda: qkv.Causal() | qkv.Prefix(3),
    "Bias": lambda: qkv.Bias(torch.ones(6, 6)),
    "ALiBi": lambda: qkv.ALiBi([0.5, 0.25]),
    "RelativeBias": lambda: qkv.RelativeBias(torch.linspace(-1, 1, 16).reshape(8, 2)),
    "Softcap": lambda: qkv.Softcap(5.0),
    "ScoreMod": lambda: qkv.ScoreMod(lambda s, b, h, i, j: s - 0.5 * abs(i - j)),
    "Sinks": lambda: qkv.Sinks([0.1, 0.2]),
    "Dropout": lambda: qkv.Dropout(0.5, seed=1),
    "RoPE": lambda: qkv.RoPE(),
    "RoPE.linear": lambda: qkv.RoPE.linear(8, 2.0),
    "RoPE.ntk_aware": lambda: qkv.RoPE.ntk_aware(8, 2.0),
    "RoPE.dynamic_ntk": lambda: qkv.RoPE.dynamic_ntk(8, 2.0, 32, 64),
    "RoPE.yarn": lambda: qkv.RoPE.yarn(8, 4.0, 32),
    "RoPE.llama3": lambda: qkv.RoPE.llama3(8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.one_in(4)
def test_variants(name: str) -> None:
    """NumPy's own call, which no compiler reads, is right."""
    make = VARIANTS[name]
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q: qkv.attention(q, q, q, make()), backend="eager", fullgraph=True
    )
    array = QUERY.numpy()
    right = qkv.attention(array, array, array, make())
    assert_close(compiled(QUERY), torch.from_numpy(np.array(right)), rtol=1e-12, atol=1e-12)


def test_the_inverse_of_a_mask() -> None:
    """Dynamo reads no `~` of any object: the graph ends there, or torch's error names it."""
    array, outside = QUERY.numpy(), ~qkv.SlidingWindow(2, 0)
    right = qkv.attention(array, array, array, outside)

    def within(q: torch.Tensor) -> torch.Tensor:
        return qkv.attention(q, q, q, ~qkv.SlidingWindow(2, 0))

    torch.compiler.reset()
    assert_close(torch.compile(within, backend="eager")(QUERY).numpy(), right)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"`invert`.*\['SlidingWindow'\]"):
        torch.compile(within, backend="eager", fullgraph=True)(QUERY)
    compiled = torch.compile(
        lambda q: qkv.attention(q, q, q, outside), backend="eager", fullgraph=True
    )
    assert_close(compiled(QUERY).numpy(), right)


def test_every_variant_has_a_case() -> None:
    made = {type(make()).__name__ for make in VARIANTS.values()}
    public = {name for name in qkv.__all__ if isinstance(getattr(qkv, name), type)}
    from qkv.variants import ALL

    missing = {kind.__name__ for kind in ALL} & public - made
    assert not missing


CONFIG = {"model_type": "llama", "head_dim": 8, "rope_theta": 1e4}
OUTSIDE: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "Segments.from_cu_seqlens": (
        lambda q: qkv.attention(q, q, q, qkv.Segments.from_cu_seqlens([0, 2, 6])),
        "Segments.from_cu_seqlens reads .* outside of the compiled function",
    ),
    "RoPE.from_hf_config": (
        lambda q: qkv.attention(q, q, q, qkv.RoPE.from_hf_config(CONFIG)),
        "RoPE.from_hf_config reads .* outside of the compiled function",
    ),
    "RoPE.longrope": (
        lambda q: qkv.attention(q, q, q, qkv.RoPE.longrope(8, [1.0] * 4, [2.0] * 4, 32, 64)),
        "RoPE.longrope reads .* outside of the compiled function",
    ),
    "MultiHeadAttention": (
        lambda q: qkv.torch.MultiHeadAttention(8, 2)(q[0].float()),
        "outside the compiled region",
    ),
    "what is not a window": (
        lambda q: qkv.attention(q, q, q, qkv.SlidingWindow(-1, 0)),
        "SlidingWindow left=-1 is not a whole number of keys",
    ),
    "keyword": (
        lambda q: qkv.attention(q, q, q, is_causal=True),
        "unexpected keyword argument 'is_causal'",
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_cannot_be_made_says_what_to_do(name: str) -> None:
    function, words = OUTSIDE[name]
    torch.compiler.reset()
    with pytest.raises(Exception, match=words):
        torch.compile(function, backend="eager", fullgraph=True)(QUERY)
