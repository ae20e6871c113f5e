"""Grouped-query attention."""

from __future__ import annotations

from typing import Self, Unpack

from qkv.arguments.declarations import Size
from qkv.mechanisms.base.llama import LlamaAttention
from qkv.mechanisms.base.projected import OptionsWithoutGroups

__all__ = ["GroupedQuery"]


class GroupedQuery(LlamaAttention):
    """Groups of query heads that share a key head and a value head.

        head_h = softmax(Q_h K_g^T / sqrt(d)) V_g,   g = h // (num_heads / num_kv_heads)

    Between multi-head attention (a group for each head) and multi-query attention (one group): most
    of the quality of the first with most of the speed of the second.

    Parameters
    ----------
    embed_dim, num_heads, num_kv_heads : int
        num_kv_heads divides num_heads.
    **options
        As for `ProjectedAttention`.

    Notes
    -----
    KV cache: `2 n num_kv_heads head_dim` numbers a layer. Keys and values are not copied for the
    heads that share them. Source: Ainslie et al., "GQA" (2023).

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import GroupedQuery
    >>> GroupedQuery(16, num_heads=4, num_kv_heads=2).weights["k_proj.weight"].shape
    (8, 16)
    """

    name = "grouped-query"
    paper = "Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models (2023)"
    formula = "[head_0, head_1, ...] W_o, head_h = softmax(Q_h K_g^T / sqrt(d)) V_g, g = h // group"

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size,
        num_kv_heads: Size,
        **options: Unpack[OptionsWithoutGroups],
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads=num_kv_heads, **options)

    @classmethod
    def example(cls) -> Self:
        """Four query heads of one number; two of them share a column of K and V."""
        return cls.for_example(num_heads=4, num_kv_heads=2)
