"""Keywords that models of transformers hand to every layer, and that change nothing of attention.

transformers passes keywords on from the model to the attention function, so that a call carries
what other parts and other kernels read. Few of those that only attention reads are understood
here; to drop one of the rest would be a wrong result without an error.
"""

from __future__ import annotations

from typing import Any

import torch

from qkv.errors import UnsupportedError

__all__ = ["refuse_unread"]

_IN_THE_MASK = """
    block_sequence_ids cache_position cu_seqlens local_size
    max_length_k max_length_q max_seqlen max_seqlens mm_token_type_ids padding_mask position_ids
    seq_idx sequence_id sliding_window token_type_ids
"""
_OF_OTHER_KERNELS = """
    block_table cache_seqlens cu_seqlens_k cu_seqlens_q deterministic kernel_options max_seqlen_k
    max_seqlen_q query_length target_dtype use_top_left_mask
"""
_OF_OTHER_PARTS = """
    attention_dropout audio_attention_mask audio_embed_sizes audio_feature_lengths bool_masked_pos
    cache cache_params conv_mask cross_attention_mask decoder_attention_mask decoder_input_ids
    decoder_inputs_embeds decoder_position_ids deepstack_visual_embeds encoder_attention_mask
    encoder_hidden_states encoder_outputs feature_attention_mask grid_thw image_attention_mask
    image_embeds image_grid_thw image_position_ids image_sizes input_features
    input_features_mask input_ids input_values inputs_embeds interpolate_pos_encoding labels
    layer_idx logits_to_keep mm_encoder_outputs num_items_in_batch num_logits_to_keep
    output_hidden_states output_router_logits past_key_value past_key_values per_layer_inputs
    pixel_attention_mask pixel_mask pixel_position_ids pixel_values pixel_values_videos
    position_embeddings return_dict return_loss return_shared_kv_states second_per_grid_ts
    shared_kv_states shift_labels spatial_shapes use_audio_in_video use_cache video_grid_thw
    video_position_ids video_second_per_grid vision_feature_layer vision_feature_select_strategy
    visual_pos_masks
"""
_OF_TOKENIZERS = """
    length num_truncated_tokens offset_mapping overflow_to_sample_mapping overflowing_tokens
    special_tokens_mask
"""

_HARMLESS = frozenset(
    " ".join([_IN_THE_MASK, _OF_OTHER_KERNELS, _OF_OTHER_PARTS, _OF_TOKENIZERS]).split()
)


def refuse_unread(module: torch.nn.Module, keywords: dict[str, Any], kv_len: int) -> None:
    """Complain of a keyword that attention would have to obey, and that is not known here."""
    if _HARMLESS.issuperset(keywords):
        return
    for name, value in keywords.items():
        if value is None or name in _HARMLESS:
            continue
        if name == "indices" and value.shape[-1] == kv_len:
            continue  # If a layer may choose as many keys as there are, it chooses all of them.
        shape = f" {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise UnsupportedError(
            f"{type(module).__name__} passes {name}= to attention, which qkv does not compute; "
            "without it the result would be wrong.",
            [(name, f"{type(value).__name__}{shape}")],
            _instead(name),
        )


def _instead(name: str) -> str:
    """What to do, which must not lead to another function that ignores the keyword."""
    if name.endswith("head_mask"):  # Eager attention of transformers 5 does not read it.
        return 'Leave it out and use qkv.hf.intervene(model, {(layer, head): "off"}).'
    return 'Use attn_implementation="eager" if the model itself passes it; otherwise leave it out.'
