"""Attention with rotary positions."""

from __future__ import annotations

from typing import Self, Unpack

from qkv.arguments.declarations import Size
from qkv.mechanisms.base.llama import LlamaAttention
from qkv.mechanisms.base.projected import Options
from qkv.variants import RoPE

__all__ = ["Rotary"]


class Rotary(LlamaAttention):
    """Queries and keys turned by their positions, so that scores depend on the distance.

        s[i, j] = (R(i) q_i) . (R(j) k_j) / sqrt(d) = q_i . (R(j - i) k_j) / sqrt(d)

    R(p) turns pair number m of the numbers of a row by `p * base ** (-2 m / d)` radians.

    Parameters
    ----------
    embed_dim, num_heads : int
    **options
        As for `ProjectedAttention`; `rope` is `qkv.RoPE()` by default.

    Notes
    -----
    `6` operations for each pair of numbers of query and key rows; no parameters. Source: Su et al.,
    "RoFormer" (2021), equation 16.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> from qkv.mechanisms import Rotary
    >>> layer = Rotary(8, num_heads=2, rope=qkv.RoPE(base=500000.0), causal=True)
    >>> layer(np.ones((5, 8))).shape
    (5, 8)
    """

    name = "rotary"
    paper = "Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021)"
    formula = "softmax((R Q)(R K)^T / sqrt(d)) V, R(p) turns pair m by p * base^(-2m/d)"

    needs_rope = True

    def __init__(self, embed_dim: Size, num_heads: Size = 1, **options: Unpack[Options]) -> None:
        if options.get("rope") is None:
            options["rope"] = RoPE()
        super().__init__(embed_dim, num_heads, **options)

    @classmethod
    def example(cls) -> Self:
        """One head of two pairs, which are neighbours, as in the paper."""
        return cls.for_example(rope=RoPE(layout="interleaved"))
