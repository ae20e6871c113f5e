"""Sequences in one row, as the keywords of flash attention state them."""

from __future__ import annotations

from typing import Any

import torch

from qkv.errors import UnsupportedError
from qkv.hf.prepared_layers import are_of_distances
from qkv.variants import MaskVariant, Segments

__all__ = ["packed_rows"]


def packed_rows(
    cu_seq_lens: tuple[torch.Tensor, torch.Tensor | None],
    masks: tuple[Any, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    causal: bool,
) -> tuple[Segments, ...]:
    """The mask of packed sequences, unless `masks` have it.

    transformers reads packed sequences from position_ids, without a cache and not in every model.
    Cumulative lengths say the same in every call, and flash attention obeys them.

    Parameters
    ----------
    cu_seq_lens : tensors `[0, n0, n0 + n1, ...]`, of queries and of keys
    masks : tuple of masks and tensors
        Those of the layer.
    query, key : tensor (batch, heads, length, head_dim)
    causal : bool
        Whether the layer is causal. A layer that is not, and has other rows, reads pictures: some
        models hand it the keyword as well.

    Raises
    ------
    UnsupportedError
        The lengths are not of the layer's rows, or a mask counts from the start of the row.
    """
    variants = tuple([mask for mask in masks if isinstance(mask, MaskVariant)])
    if any(isinstance(mask, Segments) for mask in variants):
        return ()
    edges, key_edges = cu_seq_lens
    batch, _, q_len, _ = query.shape
    fits = batch == 1 and key.shape[2] == q_len
    if not torch.compiler.is_compiling():
        # No value can be read while torch traces.
        counted = int(edges[-1]) == q_len
        if not (causal or counted):
            return ()
        fits = fits and counted and (key_edges is None or torch.equal(edges, key_edges))
    if not fits or not are_of_distances(variants):
        raise UnsupportedError(
            "cu_seq_lens_q states sequences that are packed into one row. It goes with a batch of "
            "one, with as many queries and keys as it counts, and with causal masks and windows.",
            [
                ("query", str(tuple(query.shape))),
                ("key", str(tuple(key.shape))),
                ("cu_seq_lens_q", f"{edges!s:.100}"),
                ("masks", f"{variants!s:.100}"),
            ],
            "Pass input_ids of one row, without padding and without a cache of earlier tokens, or "
            "leave cu_seq_lens_q and cu_seq_lens_k out.",
        )
    rows = torch.arange(q_len, device=edges.device, dtype=edges.dtype)
    ids = torch.bucketize(rows, edges[1:], right=True)
    return (Segments(ids * (edges[-1] == q_len)),)  # One sequence, where other rows are counted.
