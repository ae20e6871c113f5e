"""Loaders of mechanisms offered modules of every other kind: they load or refuse in qkv's words."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeAttention

from qkv.errors import ArgumentError, QkvError, UnsupportedError
from qkv.mechanisms import MECHANISMS, ALiBi, GatedDelta, Mamba, Mamba2, MultiHead, MultiQuery

LOADERS = [name for name, cls in MECHANISMS.items() if hasattr(cls, "from_transformers")]
FROM_TORCH = [name for name, cls in MECHANISMS.items() if hasattr(cls, "from_torch")]
SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Bert": SIZES,
    "BigBird": SIZES | {"block_size": 2, "num_random_blocks": 1},
    "Bloom": {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32},
    "Cohere": SIZES,
    "DeepseekV2": SIZES | {
        "kv_lora_rank": 4, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 4, "n_routed_experts": 2, "num_experts_per_tok": 1,
        "first_k_dense_replace": 2,
    },
    "DiffLlama": SIZES,
    "DistilBert": {"dim": 16, "n_heads": 2, "n_layers": 1, "hidden_dim": 16, "vocab_size": 32},
    "Falcon": SIZES | {"bias": False, "multi_query": False, "alibi": True},
    "FalconMamba": SIZES | {"state_size": 4},
    "GPT2": {"n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 32, "n_positions": 64},
    "GPTBigCode": {"n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 32},
    "GPTJ": {"n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 32, "rotary_dim": 4},
    "GPTNeo": {
        "hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 32,
        "attention_types": [[["global", "local"], 1]],
    },
    "GPTNeoX": SIZES,
    "Gemma2": SIZES | {"head_dim": 8},
    "Llama": SIZES,
    "Longformer": SIZES | {"attention_window": [4, 4]},
    "Mamba": SIZES | {"state_size": 4},
    "Mamba2": SIZES | {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1},
    "Mistral": SIZES | {"sliding_window": 4},
    "Mpt": {"d_model": 16, "n_heads": 2, "n_layers": 1, "vocab_size": 32},
    "OPT": {
        "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "vocab_size": 32, "word_embed_proj_dim": 16,
    },
    "Phi": SIZES,
    "Qwen3": SIZES | {"head_dim": 8},
    "Rwkv": {"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2,
             "vocab_size": 32},
    "T5": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 1,
           "vocab_size": 32},
    "ViT": SIZES | {"image_size": 8, "patch_size": 4},
}  # fmt: skip


@cache
def modules_of(name: str) -> list[torch.nn.Module]:
    """The model, and the first module of each class in it."""
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    return list({type(module): module for module in reversed(list(model.modules()))}.values())


def load(name: str, module: Any) -> Any:
    cls: Any = MECHANISMS[name]
    more = [np.zeros((2, 4, 1), np.int64)] if name == "big-bird" else []
    return cls.from_transformers(module, *more)


def outcome(load: Callable[[Any], Any], module: Any) -> str:
    """ "loaded", "refused", or the error of another library."""
    try:
        load(module)
    except QkvError as error:
        return "refused" if error.action else f"{error}, without an action"
    except Exception as error:
        return f"{type(module).__name__}: {error!r:.200}"
    return "loaded"


OWN = {
    "BigBirdBlockSparseAttention": ["big-bird"],
    "BloomAttention": ["alibi"],
    "CohereAttention": ["grouped-query", "rotary"],
    "DeepseekV2Attention": ["multi-head-latent"],
    "DiffLlamaAttention": ["differential"],
    "GPTBigCodeAttention": ["multi-query"],
    "Gemma2Attention": ["sliding-window"],
    "LlamaAttention": ["grouped-query", "rotary"],
    "LongformerSelfAttention": ["longformer"],
    "Mamba2Mixer": ["mamba2"],
    "MambaMixer": ["mamba"],
    "MistralAttention": ["sliding-window"],
    "Qwen3Attention": ["grouped-query", "rotary"],
    "RwkvSelfAttention": ["rwkv4"],
    "T5Attention": ["relative-bias"],
    "ViTAttention": ["grouped-query"],
}
"""Modules that mechanisms read."""


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_modules_of_every_kind_are_loaded_or_refused(model: str) -> None:
    for module in modules_of(model):
        found = {name: outcome(partial(load, name), module) for name in LOADERS}
        assert set(found.values()) <= {"loaded", "refused"}, found
        loaded = sorted(name for name, what in found.items() if what == "loaded")
        assert loaded == OWN.get(type(module).__name__, [])


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_no_module_of_transformers_is_refused(name: str) -> None:
    for module in (None, "model", 3, torch.nn.Linear(4, 4), torch.nn.MultiheadAttention(8, 2)):
        assert outcome(partial(load, name), module) == "refused"


@pytest.mark.parametrize("name", FROM_TORCH)
def test_what_is_no_attention_of_torch_is_refused(name: str) -> None:
    more: dict[str, Any] = {"longformer": {"window": 1}, "big-bird": {"block": 2}}.get(name, {})
    cls: Any = MECHANISMS[name]
    layer = torch.nn.TransformerEncoderLayer(8, 2)
    for module in (None, "model", torch.nn.Linear(4, 4), layer, modules_of("Llama")[3]):
        assert outcome(partial(cls.from_torch, **more), module) == "refused"


def test_errors_name_what_a_module_lacks() -> None:
    by_name = {
        type(m).__name__: m for model in ("GPT2", "Falcon", "Llama") for m in modules_of(model)
    }
    with pytest.raises(ArgumentError, match="GPT2Attention has no multi_query"):
        MultiQuery.from_transformers(by_name["GPT2Attention"])
    with pytest.raises(ArgumentError, match=r"FalconAttention has no query_key_value\.bias"):
        ALiBi.from_transformers(by_name["FalconAttention"])
    for cls in (Mamba, Mamba2, GatedDelta):
        with pytest.raises(ArgumentError, match="LlamaAttention has no activation"):
            cls.from_transformers(by_name["LlamaAttention"])
    with pytest.raises(ArgumentError, match="Linear has no in_proj_weight"):
        MultiHead.from_torch(torch.nn.Linear(4, 4))
    attention = GPTBigCodeAttention(transformers.GPTBigCodeConfig(n_embd=16, n_head=2), layer_idx=0)
    attention.c_attn = torch.nn.Linear(16, 3)
    with pytest.raises(UnsupportedError, match="cannot be read as multi-query"):
        MultiQuery.from_transformers(attention)
