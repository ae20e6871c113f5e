"""A tiny random model of any causal model type of transformers, from its configuration class."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

CAUSAL = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 128

_NAMES_BY_SIZE: dict[int, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    32: "hidden_size d_model n_embd embed_dim dim emb_dim embedding_size lru_width",
    4: "num_hidden_layers num_attention_heads n_head num_heads n_heads decoder_attention_heads "
    "encoder_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts "
    "qk_rope_head_dim rope_head_dim linear_num_value_heads linear_num_heads linear_conv_kernel_dim "
    "mamba_n_heads mamba_num_heads mamba_d_conv conv_kernel mamba_dt_rank time_step_rank "
    "index_n_heads index_topk laurel_rank num_memory_blocks",
    3: "n_layer num_layers n_layers num_channels in_channels",
    2: "num_key_value_heads num_kv_heads encoder_layers decoder_layers num_decoder_layers depth "
    "num_encoder_layers num_experts_per_tok moe_topk top_k_experts num_experts_per_token n_group "
    "moe_k moe_top_k linear_num_key_heads mamba_expand type_vocab_size o_groups altup_num_inputs "
    "num_global_key_value_heads eos_token_id sep_token_id",
    8: "head_dim d_kv attention_head_dim kv_channels v_head_dim local_attention o_lora_rank "
    "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state mamba_chunk_size "
    "ssm_state_size chunk_size state_size index_head_dim query_pre_attn_scalar "
    "hidden_size_per_layer_input",
    48: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
    "hidden_dim intermediate_size_mlp mlp_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "expert_dim q_lora_rank mamba_d_head mamba_head_dim mamba_headdim bottleneck_size "
    "global_head_dim",
    256: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length",
    6: "sliding_window attention_window_size window_size sliding_window_size attention_chunk_size "
    "qk_nope_head_dim",
    12: "kv_lora_rank",
    1: "bos_token_id cls_token_id decoder_start_token_id n_shared_experts topk_group n_groups "
    "num_shared_experts first_k_dense_replace num_dense_layers mamba_n_groups mamba_ngroups "
    "num_kv_shared_layers",
    0: "pad_token_id",
}  # fmt: skip
SIZES = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
UNLESS_NONE = {
    "q_lora_rank", "window_size", "decoder_start_token_id", "num_global_key_value_heads",
    "global_head_dim", "head_dim", "num_kv_shared_layers",
}  # fmt: skip
"""Fields that stay as they are where their default is None."""

GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "global_head_dim": 8,
}
OWN: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "minimax_m2": {"rotary_dim": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "llama4_text": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "deepseek_v32": {"index_topk": 64},
    "glm_moe_dsa": {"index_topk": 64},
    "axk2": {"index_topk": 64},
    "hy_v4": {"index_topk": 64},
    "zamba2": {"attention_head_dim": 16},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "longcat_flash": {"num_layers": 2, "head_dim": 4},
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a type needs beside, so that its sizes fit one another."""


def config_of(model_type: str) -> Any:
    """A small configuration; a field of a known name gets a size, every other keeps its default."""
    cls = CONFIG_MAPPING[model_type]
    config = cls(**_fields(cls), **OWN.get(model_type, {}))
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def _fields(cls: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(cls):
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    else:
        parameters = inspect.signature(cls.__init__).parameters.values()
        defaults = {parameter.name: parameter.default for parameter in parameters}
    own = OWN.get(cls.model_type, {})
    found: dict[str, Any] = {}
    for name, default in defaults.items():
        if name in SIZES and name not in own and not isinstance(default, list | tuple):
            if default is not None or name not in UNLESS_NONE:
                found[name] = SIZES[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(default, int):
            found[name] = min(default, VOCABULARY - 1 - len(found) % 8)
    if "kv_lora_rank" in found and "num_key_value_heads" in found:
        found["num_key_value_heads"] = 4
    for name, part in dict(getattr(cls, "sub_configs", {}) or {}).items():
        if name in defaults and isinstance(part, type) and part.__name__ != "AutoConfig":
            found[name] = _fields(part)
    return found


def model_of_type(model_type: str) -> Any:
    """Wide random weights in float64: with the default ones attention is nearly uniform."""
    config = config_of(model_type)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    torch.manual_seed(0)
    model = (cls[0] if isinstance(cls, tuple | list) else cls)(config).eval().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if "A_log" in name or "dt_bias" in name:
                continue
            if parameter.ndim > 1:
                fan_in = 1 if "embed" in name or "wte" in name else parameter.shape[1]
                parameter.copy_(drawn * 1.6 / math.sqrt(max(fan_in, 1)))
            elif "norm" in name.lower() or "ln" in name:
                parameter.copy_(drawn * 0.2 + (1.0 if "weight" in name else 0.0))
            else:
                parameter.copy_(drawn * 0.5)
    return model
