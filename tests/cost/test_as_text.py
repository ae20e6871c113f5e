"""What an interpreter and a notebook show of a result is a line with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import qkv
from qkv import cost, samples

SHOWN: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "model": (lambda: cost.model_card("llama-3-8b"), ("LLaMA-3 8B", "32 layers", "4,096")),
    "all tokens": (
        lambda: cost.model_cost("llama-3-8b", 8192),
        ("all tokens", "8,192", "8,030,261,248 parameters", "1,073,741,824 bytes of KV cache"),
    ),
    "one token": (
        lambda: cost.model_cost("llama-3-8b", 8192, decode=True),
        ("one more token", "8,192", "bfloat16"),
    ),
    "layer": (lambda: cost.model_cost("llama-3-8b", 8192).layers[0], ("count=32",)),
    "ranks": (
        lambda: cost.ranks_cost("llama-3-8b", 1_000_000, 64),
        ("1,000,000 tokens", "64 ranks in zigzag order", "ring 6.9 s", "ulysses refused"),
    ),
    "mechanism": (lambda: cost.mechanism_cost("linear", 4096), ("linear", "context=4096")),
    "scaling": (lambda: qkv.scaling_curve([2], draws=10), ("draws=10",)),
    "tiny": (samples.tiny_model, ("TinyModel", "2 layers of 4 heads", "97 tokens")),
    "language": (samples.language_model, ("4 layers of 4 heads", "1,024 tokens")),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_result_is_shown_as_a_line(name: str) -> None:
    make, parts = SHOWN[name]
    shown = repr(make())
    assert len(shown) < 320
    assert "\n" not in shown
    assert [part for part in parts if part not in shown] == []
