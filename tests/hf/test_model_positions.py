"""Texts with more tokens than a model has positions: said where rotary models compute on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import CACHE  # noqa: E402

import qkv.hf  # noqa: E402

MODEL = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=8,
    )
).eval()  # fmt: skip
qkv.hf.enable()
MODEL.set_attn_implementation("qkv")
IDS = torch.arange(3, 12)[None]


def inspected(length: int) -> None:
    with qkv.hf.inspect(MODEL), torch.no_grad():
        MODEL(IDS[:, :length])


def cached(length: int, **options: Any) -> None:
    """Two tokens, then one after another."""
    cache = qkv.hf.Cache(MODEL.config, **options)
    with torch.no_grad():
        MODEL(IDS[:, :2], **{CACHE: cache})
        for n in range(2, length):
            MODEL(IDS[:, n : n + 1], **{CACHE: cache})


WAYS = {
    "inspect": inspected,
    "cache": cached,
    "pages": lambda length: cached(length, page_size=4),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_text_beyond_the_positions_of_a_model(way: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WAYS[way](8)
    with pytest.warns(UserWarning, match="9 tokens; the model has 8 positions") as found:
        WAYS[way](9)
    assert len(found) == 1
