"""Families of models: names of fields, what a `model_type` means, what a config may leave out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

__all__ = [
    "ACTIVATION", "CHOSEN", "CONTEXT", "EMBED_WIDTH", "EXPERTS", "HEADS", "HIDDEN", "KV_HEADS",
    "LAYERS", "WIDTH", "WINDOW", "defaults", "families", "left_out",
]  # fmt: skip

WIDTH = ("hidden_size", "n_embd", "n_embed", "d_model", "dim")
EMBED_WIDTH = ("word_embed_proj_dim", "embedding_size")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
HIDDEN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim")
CONTEXT = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
ACTIVATION = ("hidden_activation", "hidden_act", "activation_function", "activation")
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token")
WINDOW = ("sliding_window", "local_attention")
_ALIASES = (
    WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, CONTEXT, ACTIVATION, EXPERTS, CHOSEN, WINDOW,
)  # fmt: skip
"""Names of one thing in configurations of different families."""

_USUAL: dict[str, Any] = {
    "activation": "silu",
    "attention_only": False,
    "audio": False,
    "causal": True,
    "centred": False,
    "cross": False,
    "embedding_norm": False,
    "expert_correction": False,
    "final_norm": True,
    "first_norm": True,
    "gated": True,
    "global_every": 0,
    "global_first": False,
    "head": True,
    "has_qk_norm": True,
    "head_bias": False,
    "heads": "",
    "key_bias": True,
    "mlp_bias": False,
    "narrow": False,
    "narrow_tables": False,
    "no_rotary": False,
    "norm_bias": False,
    "norm_weight": True,
    "norms": 2,
    "one_norm": False,
    "out_bias": False,
    "patches": False,
    "pooler": False,
    "positions": None,
    "qk_norm": "",
    "qk_norm_bias": False,
    "qkv_bias": False,
    "relative_bias": False,
    "rotary": True,
    "router_bias": False,
    "scaled": True,
    "shared_gate": False,
    "sinks": False,
    "tied": False,
    "token_types": False,
    "tokens": True,
    "unread": (),
}
"""The properties of a Llama, which hold for a family unless families.json says otherwise.

Where a boolean is meant, a text names the field of the configuration that has it.
"""


@cache
def families() -> dict[str, dict[str, Any]]:
    """Properties of each known `model_type` that its configuration does not state."""
    table = _table("families.json")
    return {
        name: {**_USUAL, **table.get(row.get("like", ""), {}), **row} for name, row in table.items()
    }


@cache
def defaults() -> dict[str, dict[str, Any]]:
    """What transformers takes for a field that a configuration leaves out, by `model_type`."""
    return _table("family_defaults.json")


def _table(name: str) -> dict[str, dict[str, Any]]:
    text = resources.files("qkv.cost.configs").joinpath(name).read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


def left_out(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The defaults of a family for what a configuration says under no name."""
    said = set(fields)
    for names in _ALIASES:
        if said.intersection(names):
            said.update(names)
    return {name: value for name, value in defaults().get(kind, {}).items() if name not in said}
