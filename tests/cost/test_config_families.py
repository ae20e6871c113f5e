"""Configurations that leave fields out, beside the models that transformers makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from qkv.cost import model_cost, read_config
from qkv.cost.families import defaults

ENCODERS = ("bert", "roberta", "vit")
DECODERS = [kind for kind in defaults() if kind not in ENCODERS]
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
FALCON = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 4}),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    ("falcon", {**FALCON, "parallel_attn": False, "alibi": True, "multi_query": False}),
    ("falcon", {**FALCON, "bias": True}),
    ("bloom", {"n_embed": 64, "n_head": 8, "n_layer": 3}),
    ("gpt_bigcode", {"multi_query": False, "n_layer": 1}),
    ("stablelm", {"use_qkv_bias": True, "num_hidden_layers": 1}),
]


def made(kind: str, fields: dict[str, Any]) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields))


def parameters_agree(kind: str, fields: dict[str, Any]) -> None:
    model = made(kind, fields)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    # Published weights hold these too; transformers makes them buffers.
    corrections = [x for name, x in model.named_buffers() if name.endswith("_correction_bias")]
    wanted += sum(buffer.numel() for buffer in corrections)
    found = read_config({"model_type": kind, **fields})
    assert model_cost(found, 16).parameters == wanted
    assert "left out, so as in transformers: " in found.notes[-1]


@pytest.mark.sampled("kind", DECODERS, one_in=8)
def test_fields_that_are_left_out_are_those_of_the_family(kind: str) -> None:
    fields: dict[str, Any] = {next(name for name in LAYERS if name in defaults()[kind]): 4}
    if kind == "deepseek_v2":
        fields["num_experts_per_tok"] = 6  # which its own class leaves out
    parameters_agree(kind, fields)


@pytest.mark.parametrize(("kind", "fields"), VARIANTS)
def test_variants_within_a_family(kind: str, fields: dict[str, Any]) -> None:
    parameters_agree(kind, fields)


@pytest.mark.parametrize(
    "more",
    [
        {"new_decoder_architecture": True, "multi_query": True, "num_kv_heads": 2},
        {"multi_query": True, "num_kv_heads": 2},
        {"multi_query": False},
    ],
)
def test_the_cache_of_falcon_has_the_key_heads_that_are_projected(more: dict[str, Any]) -> None:
    """Falcon 40B says `multi_query` and 8 key heads, of which the second holds."""
    fields = {**FALCON, "vocab_size": 32, **more}
    attention = made("falcon", fields).transformer.h[0].self_attention
    rows, head_dim = attention.query_key_value.weight.shape[0], attention.head_dim
    kv_heads = (rows // head_dim - attention.num_heads) // 2
    cost = model_cost(read_config({"model_type": "falcon", **fields}), 5, dtype="float32")
    assert cost.kv_cache_bytes == 4 * 5 * 2 * 2 * kv_heads * head_dim  # numbers of two layers
