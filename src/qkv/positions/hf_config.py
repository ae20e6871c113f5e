"""Rotary frequencies from the configuration of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.errors import ArgumentError
from qkv.positions import scaling

__all__ = ["RotaryEmbedding", "read"]

DEFAULT_THETA = 10000.0
"""The default base of transformers, for configurations without one."""

_THETA = ("rope_theta", "rotary_emb_base")
_PROPORTION = ("partial_rotary_factor", "rotary_pct")
"""Names of one thing in configurations of different ages."""

INTERLEAVED = frozenset({
    "axk2", "bailing_hybrid", "blt", "blt_global_transformer", "blt_local_decoder",
    "blt_local_encoder", "blt_patcher", "codegen", "cohere", "cohere2", "cohere2_moe",
    "deepseek_v2", "deepseek_v4", "dots3_note_text", "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe",
    "ernie4_5_vl_moe_text", "glm", "glm4", "glm4v", "glm4v_text", "glm_moe_dsa", "glm_ocr",
    "glm_ocr_text", "gptj", "helium", "hy_v4_vl_text", "llama4", "llama4_text", "longcat_flash",
    "mistral_large4_text", "moonshine", "moonshine_streaming", "openai_privacy_filter", "roformer",
})  # fmt: skip
"""Models that rotate pairs of neighbours, which their configurations do not say."""

INTERLEAVED_UNLESS_SAID = frozenset({
    "axk1", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "mistral4", "sarvam_mla", "youtu",
})  # fmt: skip
"""Models whose `rope_interleave` is true where it is left out."""

BACKWARDS = frozenset({"nanochat"})
"""Models that turn by minus the angle."""

TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """The rotary embedding that a configuration describes."""

    inv_freq: NDArray[np.float64]
    attention_factor: float = 1.0
    interleaved: bool = False


class _Fields:
    """Fields of a configuration and, before them, of its rotary part."""

    def __init__(self, config: Any, rotary: Mapping[str, Any]) -> None:
        self.config, self.rotary = config, rotary

    def get(self, *names: str) -> Any:
        """The first that is there and not None."""
        for name in names:
            for value in (self.rotary.get(name), _field(self.config, name)):
                if value is not None:
                    return value
        return None

    def need(self, *names: str) -> Any:
        value = self.get(*names)
        if value is None:
            raise ArgumentError(
                f"the configuration has no {' or '.join(names)}, which its rotary embedding needs.",
                [("rotary part", str(dict(self.rotary))[:200])],
                "Pass the whole config.json of the model, or construct qkv.RoPE yourself.",
            )
        return value


def read(config: Any, layer_type: str | None, seq_len: int | None) -> RotaryEmbedding:
    """Frequencies and attention factor; see `RoPE.from_hf_config`."""
    if isinstance(config, str | bytes | PathLike):
        raise ArgumentError(
            f"config={shown(config, 80)} is a name, not a configuration.",
            action="Pass transformers.AutoConfig.from_pretrained(name), or the dict of a "
            "config.json.",
        )
    fields = _Fields(config, _rotary_part(config, layer_type))
    kind = fields.get("rope_type") or fields.rotary.get("type") or "default"
    if kind not in TYPES:
        raise ArgumentError(
            f"the rotary type {shown(kind)} of the configuration is not known.",
            [("known", ", ".join(TYPES))],
            "Pass RoPE(inv_freq=..., attention_factor=...) as the model's own code computes them.",
        )
    head_dim, base = _head_dim(fields), fields.get(*_THETA) or DEFAULT_THETA
    # The proportion may be that of a whole head which `qk_rope_head_dim` has taken already.
    latent = fields.get("qk_rope_head_dim") is not None
    proportion = 1.0 if latent else fields.get(*_PROPORTION) or 1.0
    dim = fields.get("rotary_dim") or int(head_dim * proportion)
    inv_freq, factor = _scaled(fields, kind, head_dim, proportion, dim, base, seq_len)
    model = str(_field(config, "model_type") or "")
    if model in BACKWARDS:
        inv_freq = -inv_freq
    said = fields.get("rope_interleave")
    usual = model in INTERLEAVED or model in INTERLEAVED_UNLESS_SAID
    return RotaryEmbedding(inv_freq, factor, usual if said is None else bool(said))


def _scaled(
    fields: _Fields,
    kind: str,
    head_dim: int,
    proportion: float,
    dim: int,
    base: float,
    seq_len: int | None,
) -> tuple[NDArray[np.float64], float]:
    if kind == "default":
        return scaling.inverse_frequencies(dim, base), 1.0
    if kind == "linear":
        return scaling.linear(dim, fields.need("factor"), base), 1.0
    if kind == "proportional":
        factor = fields.get("factor") or 1.0
        return scaling.proportional(head_dim, proportion, factor, base), 1.0
    if kind == "dynamic":
        trained = fields.need("max_position_embeddings")
        length = seq_len or trained
        return scaling.dynamic_ntk(dim, fields.need("factor"), trained, length, base), 1.0
    trained = _trained_length(fields)
    if kind == "llama3":
        limits = fields.need("low_freq_factor"), fields.need("high_freq_factor")
        return scaling.llama3(dim, fields.need("factor"), *limits, trained, base), 1.0
    factor = fields.get("factor")
    if factor is None:
        factor = fields.need("max_position_embeddings") / trained
    given = fields.get("attention_factor")
    if kind == "yarn":
        betas = fields.get("beta_fast") or 32.0, fields.get("beta_slow") or 1.0
        scales = fields.get("mscale"), fields.get("mscale_all_dim")
        truncate = fields.rotary.get("truncate", True)
        return scaling.yarn(dim, factor, trained, *betas, given, *scales, truncate, base)
    sets = fields.need("short_factor"), fields.need("long_factor")
    return scaling.longrope(dim, *sets, trained, seq_len or trained, factor, given, base)


def _trained_length(fields: _Fields) -> int:
    # Phi-3 has it beside the rotary part, which then comes first, as in transformers.
    beside = _field(fields.config, "original_max_position_embeddings")
    if beside is not None:
        return int(beside)
    return int(fields.need("original_max_position_embeddings", "max_position_embeddings"))


def _head_dim(fields: _Fields) -> int:
    # Latent attention (DeepSeek) rotates only a part of each head, which is an array of its own.
    head_dim = fields.get("qk_rope_head_dim", "head_dim")
    if head_dim is not None:
        return int(head_dim)
    heads = fields.need("num_attention_heads", "n_head")
    return int(fields.need("hidden_size", "n_embd")) // int(heads)


def _rotary_part(config: Any, layer_type: str | None) -> Mapping[str, Any]:
    part = _field(config, "rope_parameters") or _field(config, "rope_scaling") or {}
    if not isinstance(part, Mapping):
        raise ArgumentError(
            f"rope_parameters of the configuration is a {type(part).__name__}, not a dict.",
            action="Pass a configuration as transformers writes it.",
        )
    layers = {name: value for name, value in part.items() if isinstance(value, Mapping)}
    if not layers:
        return part
    if layer_type not in layers or not layers[layer_type]:
        raise ArgumentError(
            "layers of this model differ in their rotary embedding; "
            f"layer_type={shown(layer_type)}.",
            [("layer types", ", ".join(layers))],
            "Pass layer_type=... with one of them.",
        )
    return layers[layer_type]


def _field(config: Any, name: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(name)
    try:
        return getattr(config, name, None)
    except RuntimeError as error:  # transformers' AmbiguousGlobalPerLayerAttributeError
        raise ArgumentError(
            f"layers of this model differ in their {name}.",
            [("transformers", str(error)[:200])],
            "Pass the configuration of one layer, config.per_layer_config[i].",
        ) from error
