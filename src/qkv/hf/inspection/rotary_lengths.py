"""Rotary frequencies that models keep from the longest of the texts before."""

from __future__ import annotations

import torch

__all__ = ["forget_longer_texts"]


def forget_longer_texts(model: torch.nn.Module) -> None:
    """Let "dynamic" frequencies be those of the next text, whatever was read before.

    transformers makes them for the longest text so far, and makes them anew only for a longer text,
    or for one that needs no scaling.
    """
    for part in model.modules():
        kinds = getattr(part, "rope_type", None)
        named = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in named.items():
            if not isinstance(kind, str) or "dynamic" not in kind:
                continue
            prefix = "" if layer_type is None else f"{layer_type}_"
            first = getattr(part, f"{prefix}original_inv_freq", None)
            used = getattr(part, f"{prefix}inv_freq", None)
            if isinstance(first, torch.Tensor) and isinstance(used, torch.Tensor):
                part.register_buffer(f"{prefix}inv_freq", first.to(used.device), persistent=False)
                setattr(part, f"{prefix}max_seq_len_cached", part.original_max_seq_len)
