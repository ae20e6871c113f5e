"""Multi-head attention."""

from __future__ import annotations

from typing import Self

from qkv.mechanisms.base.projected import ProjectedAttention

__all__ = ["MultiHead"]


class MultiHead(ProjectedAttention):
    """Several heads side by side, each with projections of its own.

        head_h = softmax(Q_h K_h^T / sqrt(head_dim)) V_h,   Q_h = x W_q[h], ...
        out    = [head_0, head_1, ...] W_o

    A single head averages what it reads; several can read different tokens at once.

    Parameters
    ----------
    embed_dim, num_heads : int
    **options
        As for `ProjectedAttention`: head_dim, kv_dim, causal, bias, out_proj, scale, weights, seed.

    Notes
    -----
    `4 embed_dim**2` parameters without biases; about `8 n embed_dim**2 + 4 n**2 embed_dim`
    operations. Source: Vaswani et al. (2017), section 3.2.2.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import MultiHead
    >>> MultiHead(16, num_heads=4)(np.ones((2, 5, 16))).shape
    (2, 5, 16)
    """

    name = "multi-head"
    paper = "Vaswani et al., Attention Is All You Need (2017), section 3.2.2"
    formula = "[head_0, head_1, ...] W_o, head_h = softmax(Q_h K_h^T / sqrt(d)) V_h"

    @classmethod
    def example(cls) -> Self:
        """Two heads of two numbers on the shared five tokens."""
        return cls.for_example(num_heads=2)
