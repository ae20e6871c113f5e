"""Sizes of models against their cards, and the reading of configs against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkv.cli import main
from qkv.cost import (
    Attention,
    FeedForward,
    Latent,
    Model,
    model_card,
    model_cost,
    model_names,
    read_config,
)
from qkv.errors import ArgumentError, FileError, UnsupportedError

# Exact parameter counts: the metadata of the safetensors files that the model pages show, and
# torchvision's table for ViT-L/16, which has a classifier of 1000 classes.
EXACT = {
    "gpt-2": 124_439_808,
    "bert-base": 109_482_240,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "qwen-3-8b": 8_190_735_360,
    "qwen-3-32b": 32_762_123_264,
    "qwen-3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
}

# In billions, as papers print them: total, and active for mixtures of experts.
# GPT-3: Brown et al. (2020), table 2.1. Qwen 3: Yang et al. (2025), table 2. DeepSeek-V3: abstract
# of the report. gpt-oss: model card, table 1, whose active count leaves out the token table as ours
# does; the report of Qwen 3 does not.
PRINTED = {
    "gpt-3": (175.0, None),
    "qwen-3-235b-a22b": (235, 22),
    "deepseek-v3": (671, 37),
    "gpt-oss-20b": (20.91, 3.61),
    "gpt-oss-120b": (116.83, 5.13),
}

# Bytes of cache for each token in bfloat16. Llama-3.1 405B and DeepSeek-V3: "Insights into
# DeepSeek-V3" (2025), table 1: 516.096 KB and 70.272 KB.
CACHE = {"llama-3-405b": 516_096, "deepseek-v3": 70_272}


@pytest.mark.parametrize("name", EXACT)
def test_parameters_of_published_weights(name: str) -> None:
    assert model_cost(name, 16).parameters == EXACT[name]


def test_parameters_of_vit_large_with_its_classifier() -> None:
    config = {
        "model_type": "vit", "hidden_size": 1024, "num_hidden_layers": 24, "patch_size": 16,
        "num_attention_heads": 16, "intermediate_size": 4096, "image_size": 224, "qkv_bias": True,
        "id2label": {str(label): "" for label in range(1000)},
    }  # fmt: skip
    model = read_config(config)
    assert model_cost(model).parameters == 304_326_632
    assert model.context == model_card("vit-l").context == 197


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_as_papers_print_them(name: str) -> None:
    cost = model_cost(name, 16)
    total, active = PRINTED[name]
    assert cost.parameters / 1e9 == pytest.approx(total, rel=0.003)
    if active is not None:
        table = cost.model.vocab_size * cost.model.width if "qwen" in name else 0
        assert (cost.active_parameters + table) / 1e9 == pytest.approx(active, rel=0.015)


@pytest.mark.parametrize("name", CACHE)
def test_cache_of_a_token_as_printed(name: str) -> None:
    assert model_cost(name, 1).kv_cache_bytes == CACHE[name]
    assert model_cost(name, 1000, batch=3).kv_cache_bytes == CACHE[name] * 3000


CONFIG_FILES = sorted(Path(__file__).with_name("configs").glob("*.json"))


@pytest.mark.parametrize("file", CONFIG_FILES, ids=lambda file: file.stem)
def test_config_files_of_published_models(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole files from the model pages, through the command line.

    Qwen2-7B: 7,615,616,512 parameters by the metadata of its page, and 28 layers of 4 key and value
    heads of 128 in its report (Yang et al., 2024, table 1).
    """
    assert main(["cost", "--config", str(file), "--context", "500", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert not cost["notes"]
    assert cost["whole"]["parameters"] == {**EXACT, "qwen-2-7b": 7_615_616_512}[file.stem]
    if file.stem == "qwen-2-7b":
        assert cost["whole"]["kv_cache_bytes"] == 500 * 2 * 28 * 4 * 128 * 2
    else:
        card = model_cost(file.stem, 500)
        assert cost["whole"]["kv_cache_bytes"] == card.kv_cache_bytes
        assert cost["whole"]["operations"] == card.operations


def test_a_context_beyond_learned_positions_has_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-2 has a table of 1,024 positions, and a Llama turns any number of them."""
    assert not model_cost("gpt-2", 1024).notes
    assert "1,024 learned positions" in model_cost("gpt-2", 1025).notes[-1]
    assert not model_cost("llama-3-8b", 10**6).notes
    assert main(["cost", "--model", "gpt-2"]) == 0  # which shows longer contexts too
    assert "it has 1,024 learned positions" in capsys.readouterr().out


def test_cache_of_qwen_2_5_as_printed() -> None:
    """The third row of that table: 327.680 KB for 80 layers of 8 key and value heads."""
    config = {
        "model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80, "vocab_size": 152064,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 29568,
        "use_sliding_window": False, "sliding_window": 131072, "tie_word_embeddings": False,
    }  # fmt: skip
    cost = model_cost(read_config(config), 1)
    assert cost.kv_cache_bytes == 327_680
    assert cost.parameters == 72_706_203_648  # metadata of huggingface.co/Qwen/Qwen2.5-72B


def test_windows_bound_the_cache() -> None:
    """Mistral's paper: at 32k tokens a window of 4096 makes the cache 8 times smaller."""
    whole = 2 * 32 * 8 * 128 * 2 * 32_768
    assert model_cost("mistral-7b", 32_768).kv_cache_bytes == whole // 8
    half, full = 4096 * 8192, 100_000 * 8192
    assert model_cost("gemma-2-9b", 100_000).kv_cache_bytes == 21 * (half + full)
    assert model_cost("gpt-oss-20b", 100_000).kv_cache_bytes == 12 * 2048 * (128 + 100_000)


SMALL = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
WITH_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CONFIGS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"head_dim": 16}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("phi3", {}),
    ("granite", {}),
    ("smollm3", {}),
    ("olmo2", {}),
    ("qwen2", {}),
    ("qwen2_moe", {**WITH_EXPERTS, "shared_expert_intermediate_size": 40}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3_moe", {**WITH_EXPERTS, "mlp_only_layers": [1]}),
    ("gemma", {"head_dim": 16}),
    ("gemma2", {"head_dim": 16}),
    ("gemma3_text", {"head_dim": 16}),
    ("deepseek_v2", LATENT),
    ("deepseek_v3", LATENT),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None, "attention_bias": True}),
    ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("starcoder2", {}),
    ("starcoder2", {"use_bias": False}),
    ("gpt2", {}),
    ("gpt_neox", {}),
    ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    ("bert", {}),
    ("roberta", {}),
    ("vit", {"image_size": 32, "patch_size": 8}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "extra"), CONFIGS, ids=[kind for kind, _ in CONFIGS])
def test_parameters_are_those_that_transformers_makes(
    kind: str, extra: dict[str, object], tmp_path: Path
) -> None:
    """The config's own class writes it, and its own model says how many numbers it learns."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    small = dict(SMALL)
    if kind in ("gpt2", "gpt_neox", "opt", "bert", "roberta", "vit"):
        del small["num_key_value_heads"]
    if kind == "gpt2":
        del small["intermediate_size"]
    config = AutoConfig.for_model(kind, **small, **extra)
    config.save_pretrained(tmp_path)
    encoder = kind in ("bert", "roberta", "vit")
    with torch.device("meta"):
        made = (AutoModel if encoder else AutoModelForCausalLM).from_config(config)
    wanted = sum(parameter.numel() for parameter in made.parameters())
    buffers = dict(made.named_buffers())
    wanted += sum(b.numel() for name, b in buffers.items() if "correction" in name)
    ours = read_config(tmp_path)
    if kind == "vit":
        wanted -= 32 * 32 + 32  # the pooler of ViTModel, which the published weights lack
        ours = without_classifier(tmp_path)
    assert model_cost(ours, 8).parameters == wanted
    # DeepSeek-V3 has a layer that predicts a second token, which transformers does not make either.
    assert all("num_nextn_predict_layers 1 is not counted" in note for note in ours.notes)
    if hasattr(config, "layer_types") and config.layer_types:
        local = [t == "sliding_attention" for t in config.layer_types]
        assert [layer.attention.window is not None for layer in ours.layers] == local


def without_classifier(folder: Path) -> Model:
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("id2label", None)
    return read_config(fields)


def test_local_layers_without_a_list_are_where_transformers_puts_them() -> None:
    from transformers import AutoConfig

    for kind, window in [("gemma2", 4096), ("gemma3_text", 512), ("gpt_oss", 128)]:
        fields = {**SMALL, "head_dim": 16, "num_hidden_layers": 13, "sliding_window": window}
        wanted = AutoConfig.for_model(kind, **fields).layer_types
        ours = read_config({"model_type": kind, **fields})
        for layer, kind in zip(ours.layers, wanted, strict=True):
            assert layer.attention.window == (window if kind == "sliding_attention" else None)


def test_every_card_says_where_it_comes_from() -> None:
    assert len(model_names()) == 22
    for name in model_names():
        model = model_card(name)
        assert model.source
        assert model.speculative == (name == "gpt-4")
        assert model_card(model.name) == model


def test_an_unknown_model_type_is_reported() -> None:
    model = read_config({**SMALL, "model_type": "brand_new"})
    assert model.notes == ("model_type 'brand_new' is not known; counted as llama",)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"multi_query": True, "num_key_value_heads": 2}, "multi_query says 1 key head"),
        ({"alibi": True, "parallel_attn": True}, "has alibi True, parallel_attn True, which a"),
        ({"intermediate_size": None, "moe_num_experts": 8}, "moe_num_experts 8"),
    ],
)
def test_fields_that_contradict_the_count_of_an_unknown_type_are_named(fields, words) -> None:
    model = read_config({**SMALL, "model_type": "brand_new", **fields})
    assert any(words in note for note in model.notes)
    if "multi_query" in fields:  # the larger number is counted, so that no cache is too small
        assert model.layers[0].attention.num_kv_heads == 2


def test_a_missing_width_of_the_feed_forward_layer_is_a_guess() -> None:
    fields = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
    assert "no intermediate_size" in read_config({**fields, "model_type": "brand_new"}).notes[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "qwen3_next", "full_attention_interval": 4},
        {"model_type": "some_mamba", "mamba_d_state": 16},
        {"model_type": "jamba", "attn_layer_period": 8},
        {"model_type": "lfm2", "full_attn_idxs": [2, 5]},
    ],
)
def test_layers_that_are_no_attention_are_not_counted_as_such(fields) -> None:
    with pytest.raises(UnsupportedError, match="some layers are not attention"):
        read_config({**SMALL, **fields})


def test_the_text_part_of_a_model_of_images_is_counted() -> None:
    model = read_config({"model_type": "gemma3", "text_config": {**SMALL, "model_type": "llama"}})
    assert model.notes == ("only the text model is counted",)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden_size": None}, ArgumentError, "the config has no hidden_size"),
        ({"num_attention_heads": None}, ArgumentError, "has no num_attention_heads"),
        ({"vocab_size": "many"}, ArgumentError, "vocab_size is 'many'"),
        ({"num_hidden_layers": 0}, ArgumentError, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, ArgumentError, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, ArgumentError, "3 key and value heads do not divide 4"),
        ({"num_attention_heads": 6}, ArgumentError, "6 heads do not divide a width of 32"),
        ({"hidden_act": "sine"}, UnsupportedError, "activation 'sine' is not counted"),
        ({"is_encoder_decoder": True}, UnsupportedError, "is not counted"),
        ({"layer_types": ["linear_attention"] * 4}, UnsupportedError, "'linear_attention'"),
        ({"layer_types": ["full_attention"]}, UnsupportedError, "4, of which 1 have a type"),
        ({"layer_types": ["sliding_attention"] * 4}, ArgumentError, "has no sliding_window"),
        ({"sliding_window": -5}, ArgumentError, "sliding_window is -5"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, ArgumentError, "5 experts"),
        ({"num_local_experts": 4}, ArgumentError, "has no num_experts_per_tok"),
        ({"kv_lora_rank": 16}, ArgumentError, "has no qk_rope_head_dim"),
    ],
)  # fmt: skip
def test_configs_that_no_model_has(change, error, words: str) -> None:
    fields = {"model_type": "llama", **SMALL, "num_key_value_heads": 2, **change}
    with pytest.raises(error, match=words):
        read_config(fields)


@pytest.mark.parametrize(
    ("contents", "words"),
    [("", "is not JSON"), ("[1]", "holds no JSON object"), ("[" * 100_000, "is not JSON")],
)
def test_files_that_are_no_config(contents: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(contents)
    with pytest.raises(FileError, match=words):
        read_config(file)
    with pytest.raises(FileError, match="cannot be read"):
        read_config(tmp_path / "nothing")


def test_a_card_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no card of a model 'gpt-7'"):
        model_cost("gpt-7")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Attention(4, 3, 8, 8), "num_heads=4 is not a multiple of num_kv_heads=3"),
        (lambda: Attention(4, 0, 8, 8), "num_kv_heads=0 is not a positive integer"),
        (lambda: Attention(4, 2, 8, -8), "v_head_dim=-8 is not a positive integer"),
        (lambda: Attention(4, 2, 8, 8, window=0), "window=0 is not a positive integer"),
        (lambda: Attention(4, 2, 8, 8, qk_norm="rows"), "qk_norm='rows' is none of"),  # type: ignore[arg-type]  # a user's mistake
        (lambda: Latent(-1, 8, 2), "query_rank=-1 is not a whole number of 0 or more"),
        (lambda: FeedForward(0), "width=0 is not a positive integer"),
        (lambda: FeedForward(8, "tanh"), "activation='tanh' is none of"),  # type: ignore[arg-type]  # a user's mistake
        (lambda: FeedForward(8, experts=2, experts_per_token=3), "is more than experts=2"),
    ],
)
def test_sizes_that_no_layer_has(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()
