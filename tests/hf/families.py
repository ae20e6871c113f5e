"""Tiny models of every family, wide and in float64, and transformers' own eager as the truth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

VOCABULARY = 61
WINDOW = 5
BATCH, LENGTH = 3, 14
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
CHUNKED = {
    "attention_chunk_size": 4,
    "layer_types": ["chunked_attention", "full_attention"],
    "intermediate_size_mlp": 48,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": False,
    "num_local_experts": 2,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
}
POSITIONS = {**SIZES, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BOTH = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5 = {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1}
PICTURE = {"image_size": 24, "patch_size": 6, "num_channels": 3}

DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": WINDOW}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**SIZES, "num_key_value_heads": 2, **SHARED},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**GROUPED, **SLIDING, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, **SLIDING}),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**GROUPED, **CHUNKED},
    ),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**GROUPED, **SLIDING, **EXPERTS}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**SIZES, **LATENT}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", POSITIONS),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
    "opt": ("OPTForCausalLM", "OPTConfig", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
}
TRANSLATORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", {**BOTH, **T5}),
    "bart": ("BartForConditionalGeneration", "BartConfig", BOTH),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**BOTH, "num_mel_bins": 8, "max_source_positions": 20, "suppress_tokens": None},
    ),
}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "vit": ("ViTForImageClassification", "ViTConfig", {**SIZES, **PICTURE}),
    "siglip": (
        "SiglipModel",
        "SiglipConfig",
        {
            "text_config": {**SIZES, "projection_size": 32},
            "vision_config": {**SIZES, **PICTURE},
        },
    ),
}
FAMILIES = {**DECODERS, **TRANSLATORS, **ENCODERS}


@cache
def model_of(family: str) -> Any:
    """Wide random weights: with the default ones attention is uniform, and hides mistakes."""
    model_name, config_name, model_kwargs = FAMILIES[family]
    torch.manual_seed(sum(map(ord, family)))
    config = getattr(transformers, config_name)(**model_kwargs)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, model_name)(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                fan_in = parameter.shape[1] if "embed" not in name else 1
                parameter.normal_(0, 1.6 / fan_in**0.5)
            elif "norm" in name.lower() or "ln" in name:
                parameter.normal_(1.5 if "weight" in name else 0.0, 0.2)
            else:
                parameter.normal_(0, 0.5)
    return model


class InDouble(TorchFunctionMode):
    """float64 stays float64 where a model asks for float32, as norms and eager's softmax do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wide = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64
        if wide and func is torch.Tensor.float:
            return args[0]
        if wide:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def attending(model: Any, implementation: str) -> Iterator[Any]:
    """The model with that implementation, in float64 throughout."""
    model.set_attn_implementation(implementation)
    with InDouble():
        yield model


def padding(kind: str, length: int = LENGTH) -> Any:
    """1 for real tokens, 0 for padding, with another number of real tokens in each row."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    for row in range(1, BATCH):
        gap = slice(0, 3 * row) if kind == "left" else slice(length - 3 * row, length)
        if kind != "none":
            mask[row, gap] = 0
    return mask


def inputs_of(family: str, kind: str = "none") -> dict[str, Any]:
    """What a model of the family is called with."""
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    picture = torch.randn(BATCH, 3, 24, 24, dtype=torch.float64)
    if family == "vit":
        return {"pixel_values": picture}
    if family == "siglip":
        return {"input_ids": tokens, "pixel_values": picture}
    if family == "whisper":
        sound = torch.randn(BATCH, 8, 40, dtype=torch.float64)
        return {"input_features": sound, "decoder_input_ids": tokens}
    inputs = {"input_ids": tokens, "attention_mask": padding(kind)}
    if family in TRANSLATORS:
        inputs["decoder_input_ids"] = tokens[:, 2:9]
    return inputs


def seen(family: str, inputs: dict[str, Any], logits: Any) -> Any:
    """Logits of real tokens: what is computed for padding means nothing, and differs."""
    if family in TRANSLATORS or "attention_mask" not in inputs:
        return logits
    return logits[inputs["attention_mask"].bool()]


def logits_of(family: str, output: Any) -> Any:
    if family != "siglip":
        return output.logits
    return torch.cat([output.text_embeds, output.image_embeds])
