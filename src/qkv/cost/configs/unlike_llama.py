"""What the configuration of an unknown family says that a Llama cannot be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from qkv.arguments.declarations import shown
from qkv.cost.configs.families import HIDDEN
from qkv.errors import UnsupportedError

__all__ = ["unlike_llama"]

_NO_ATTENTION = re.compile(
    r"^(mamba|ssm|linear_(attn|attention|num|key|value|conv)|conv_[lLk]|rwkv|lru|state_size|time_step)"
    r"|^(full_attention_interval|attn_layer_(period|indices|offset)|full_attn_idxs"
    r"|layers?_block_types?|hybrid_override_pattern|block_types?)$"
)
"""Fields of models some of whose layers are not attention."""

_MEANS_MORE = re.compile(
    r"alibi|type_vocab|embedding_size|parallel|multi_query|multi_query_|new_decoder|expan|(^|_)qk_?(layer)?norm|num_ln|swin"
    r"|cross|shared_|first_k|moe|expert|chunk_size$|attention_types|attention_window|sparse"
    r"|kv_shared|q_lora|o_lora|index_|(^|_)bias$|layer_norm|(^|_)ngram|per_layer|mup|gate"
)
"""Fields that change what is counted, where a Llama has no such thing or counts it otherwise."""
_READ = {
    "attention_bias", "mlp_bias", "num_experts_per_tok", "experts_per_token", "num_local_experts",
    "num_experts", "n_routed_experts", "n_shared_experts", "moe_intermediate_size",
    "shared_expert_intermediate_size", "first_k_dense_replace", "decoder_sparse_step",
    "mlp_only_layers", "q_lora_rank", "kv_lora_rank", "chunk_size_feed_forward",
    "is_encoder_decoder", "add_cross_attention", "router_aux_loss_coef", "sliding_window",
    "layer_norm_eps", "layer_norm_epsilon", "norm_topk_prob", "multi_query",
}  # fmt: skip


def unlike_llama(fields: Mapping[str, Any]) -> Iterator[str]:
    """Sentences about what contradicts the count of an unknown family as a Llama.

    Parameters
    ----------
    fields : mapping
        What `config.json` holds.

    Raises
    ------
    UnsupportedError
        Fields say that some layers are not attention.

    Examples
    --------
    >>> list(unlike_llama({"alibi": True, "intermediate_size": 8}))
    ['but the config has alibi True, which a llama has not: the count may be off']
    """
    said = {name: value for name, value in fields.items() if value not in (None, False, 0, [], {})}
    others = [name for name in said if _NO_ATTENTION.search(str(name))]
    if others:
        raise UnsupportedError(
            f"model_type {shown(fields.get('model_type', ''))} is not known, and its config says "
            "that some layers are not attention.",
            [(name, shown(said[name])) for name in others[:4]],
            "Models whose every layer is attention are counted.",
        )
    strange = [name for name in said if name not in _READ and _MEANS_MORE.search(str(name))]
    if said.get("multi_query") and (said.get("num_kv_heads") or said.get("num_key_value_heads")):
        yield "multi_query says 1 key head and another field more; the larger number is counted"
    if strange:
        named = ", ".join(f"{name} {shown(said[name], 20)}" for name in strange[:6])
        yield f"but the config has {named}, which a llama has not: the count may be off"
    if not any(name in fields for name in (*HIDDEN, "d_ff")):
        yield "there is no intermediate_size; three matrices of 4 times the width are a guess"
