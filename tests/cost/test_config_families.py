"""Configurations that leave fields out, beside the models that transformers makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.masking_utils import create_bidirectional_sliding_window_mask

from qkv.cost import model_cost, read_config
from qkv.cost.configs.families import defaults

ENCODERS = (
    "bert", "roberta", "vit", "xlm-roberta", "camembert", "distilbert", "electra", "modernbert",
)  # fmt: skip
DECODERS = [kind for kind in defaults() if kind not in ENCODERS]
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
FALCON = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2}
SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 96,
}  # fmt: skip
COMPLETE = {**SMALL, "head_dim": 16, "vocab_size": 90}
EXPERTS = {
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 4}),
    ("falcon", {**FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    ("falcon", {**FALCON, "num_ln_in_parallel_attn": 2}),
    (
        "falcon",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "parallel_attn": False,
            "num_ln_in_parallel_attn": 1,
        },
    ),
    ("falcon", {**FALCON, "parallel_attn": False, "alibi": True, "multi_query": False}),
    ("falcon", {**FALCON, "bias": True}),
    ("bloom", {"n_embed": 64, "n_head": 8, "n_layer": 3}),
    ("gpt_bigcode", {"multi_query": False, "n_layer": 1}),
    ("stablelm", {"use_qkv_bias": True, "num_hidden_layers": 1}),
    ("stablelm", {**SMALL, "qk_layernorm": True}),
    ("stablelm", {**SMALL, "use_parallel_residual": True}),
    ("cohere", {**SMALL, "use_qk_norm": True}),
    ("phi", {**SMALL, "qk_layernorm": True}),
    ("gpt_neox", {**FALCON, "attention_bias": False}),
    ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "add_cross_attention": True}),
    ("qwen2_moe", {**SMALL, "qkv_bias": False}),
    ("helium", {**SMALL, "head_dim": 16, "mlp_bias": True}),
    ("opt", {**FALCON, "word_embed_proj_dim": 16}),
    ("opt", {**FALCON, "word_embed_proj_dim": 16, "tie_word_embeddings": False}),
    ("opt", {**FALCON, "do_layer_norm_before": False}),
    ("opt", {**FALCON, "_remove_final_layer_norm": True}),
    ("opt", {**FALCON, "enable_bias": False}),
    ("opt", {**FALCON, "layer_norm_elementwise_affine": False}),
    ("glm4_moe", {**COMPLETE, **EXPERTS, "use_qk_norm": True, "n_routed_experts": 4}),
    ("phimoe", {**SMALL, "attention_bias": True, "lm_head_bias": True}),
    ("nemotron", {**COMPLETE, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True}),
]

PUBLISHED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "opt-350m": (331_196_416, "opt", {
        "vocab_size": 50272, "hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096,
        "num_attention_heads": 16, "max_position_embeddings": 2048, "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    }),
    "galactica-125m": (124_909_056, "opt", {
        "vocab_size": 50000, "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072,
        "num_attention_heads": 12, "max_position_embeddings": 2048, "word_embed_proj_dim": 768,
        "enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu",
    }),
    "command-r-plus": (103_810_674_688, "cohere", {
        "vocab_size": 256000, "hidden_size": 12288, "num_hidden_layers": 64, "use_qk_norm": True,
        "num_attention_heads": 96, "num_key_value_heads": 8, "intermediate_size": 33792,
    }),
    "stablelm-2-12b": (12_143_185_920, "stablelm", {
        "vocab_size": 100352, "hidden_size": 5120, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 13824,
        "use_qkv_bias": False, "qk_layernorm": True, "use_parallel_residual": True,
    }),
    "mpt-7b": (6_649_286_656, "mpt", {
        "vocab_size": 50432, "d_model": 4096, "n_layers": 32, "n_heads": 32, "expansion_ratio": 4,
        "max_seq_len": 2048, "no_bias": True,
    }),
    "gpt-neo-1.3b": (1_315_575_808, "gpt_neo", {
        "vocab_size": 50257, "hidden_size": 2048, "num_layers": 24, "num_heads": 16,
        "attention_types": [[["global", "local"], 12]], "window_size": 256,
    }),
    "phi-3.5-moe": (41_873_153_344, "phimoe", {
        "vocab_size": 32064, "hidden_size": 4096, "num_hidden_layers": 32, "attention_bias": True,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 6400,
        "num_local_experts": 16, "num_experts_per_tok": 2, "lm_head_bias": True,
    }),
}  # fmt: skip
"""Parameters, `model_type` and configuration of models as they are published."""


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
    if kind in defaults():
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


MODERN = {
    "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 7, "intermediate_size": 96,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("distilbert", {}),
        ("distilbert", {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96}),
        ("distilbert", {"sinusoidal_pos_embds": True, "activation": "relu"}),
        ("electra", {}),
        ("electra", {"embedding_size": 256, "num_hidden_layers": 3}),
        ("modernbert", {}),
        ("modernbert", {**MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True}),
    ],
)
def test_encoders_that_are_not_quite_bert(kind: str, fields: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[kind](**fields)
    with torch.device("meta"):
        wanted = sum(p.numel() for p in AutoModel.from_config(config).parameters())
    for given in ({"model_type": kind, **fields}, config.to_dict()):
        found = read_config(given)
        assert model_cost(found, 16).parameters == wanted
        assert not found.causal
        assert all(note.startswith("left out") for note in found.notes)


def test_products_of_electra_are_those_that_torch_counts() -> None:
    """The rows of its token table are projected to the width of the layers."""
    small = {**MODERN, "embedding_size": 24, "vocab_size": 90}
    config = CONFIG_MAPPING["electra"](**small, attn_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        AutoModel.from_config(config).eval()(torch.ones(2, 10, dtype=torch.int64))
    counts = model_cost(read_config(config.to_dict()), 10, batch=2).ledger.counts
    ours = sum(
        int(count)
        for name, count in counts.items()
        if name.endswith("_multiply") and ("_proj" in name or name[:2] in ("qk", "av"))
    )
    project_in = 2 * 10 * 24 * 64
    assert counts["project_in_multiply"] == project_in
    assert counts["project_in_add"] == project_in  # 23 of each sum of 24 products, and the bias
    assert 2 * (ours + project_in) == counter.get_total_flops()


def test_pairs_of_modernbert_are_those_of_its_masks() -> None:
    length = 40
    fields = {**MODERN, "local_attention": 16, "global_attn_every_n_layers": 3}
    config = CONFIG_MAPPING["modernbert"](**fields, attn_implementation="sdpa")
    rows = torch.zeros(1, length, 64)
    local = create_bidirectional_sliding_window_mask(config, rows, attention_mask=None)
    kinds = config.layer_types
    pairs = kinds.count("full_attention") * length**2
    pairs += kinds.count("sliding_attention") * int(local.sum())
    for given in ({"model_type": "modernbert", **fields}, config.to_dict()):
        found = read_config(given)
        assert [layer.attention.window for layer in found.layers] == [
            16 if kind == "sliding_attention" else None for kind in kinds
        ]
        products = model_cost(found, length).ledger.counts["qk_multiply"]
        assert products == pairs * MODERN["hidden_size"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    wanted, kind, fields = PUBLISHED[name]
    assert sum(parameter.numel() for parameter in made(kind, fields).parameters()) == wanted
    for decode in (False, True):
        found = model_cost(read_config({"model_type": kind, **fields}), 16, decode=decode)
        assert found.parameters == wanted


def test_a_field_that_is_not_read_has_a_note() -> None:
    fields = {"model_type": "bert", "add_cross_attention": True}
    assert "add_cross_attention True is not counted" in " ".join(read_config(fields).notes)
    more = read_config({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1})
    assert "num_nextn_predict_layers 1 is not counted" in " ".join(more.notes)
    of_gpt2 = read_config({"model_type": "gpt2", "add_cross_attention": True})
    assert "of attention to another sequence only the parameters" in of_gpt2.notes[0]


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


PICTURES = {
    "depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "mistral3"]
)
def test_the_text_part_of_a_model_of_pictures(kind: str, tied: bool) -> None:
    """Whether the output head is the token table is said of the whole model."""
    chosen = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    experts = chosen if kind.endswith("moe") else {}
    heads = {} if kind.startswith("qwen2") else {"head_dim": 16}
    given = {"text_config": {**SMALL, **heads, **experts, "vocab_size": 90}, "vision_config": {}}
    if kind == "mistral3":
        given["text_config"]["model_type"] = "mistral"
    else:
        given["vision_config"] = PICTURES
    config = CONFIG_MAPPING[kind](**given, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    text = ("model.language_model", "lm_head")
    wanted = sum(p.numel() for name, p in model.named_parameters() if name.startswith(text))
    found = read_config(config.to_dict())
    assert found.notes == ("only the text model is counted",)
    assert model_cost(found, 16).parameters == wanted


def test_an_older_config_of_a_model_of_pictures() -> None:
    """Qwen2.5-VL-7B as it is published: its text model is Qwen2.5-7B."""
    found = read_config({
        "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "use_sliding_window": False, "sliding_window": 32768,
        "max_position_embeddings": 128000, "tie_word_embeddings": False,
        "vision_config": {"depth": 32, "hidden_size": 1280},
    })  # fmt: skip
    assert model_cost(found, 16).parameters == 7_615_616_512
    assert found.notes == ("only the text model is counted",)


@pytest.mark.parametrize("left_out", [False, True])
def test_the_layers_of_exaone_4_without_a_window(left_out: bool) -> None:
    fields = {**SMALL, "num_hidden_layers": 9, "sliding_window": 8}
    kinds = CONFIG_MAPPING["exaone4"](**fields).layer_types
    given = {} if left_out else {"sliding_window_pattern": "LLLG"}
    found = read_config({"model_type": "exaone4", **fields, **given})
    windows = [8 if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.attention.window for layer in found.layers] == windows
