"""Causal self-attention."""

from __future__ import annotations

from typing import ClassVar

from qkv.mechanisms.base.projected import Options, ProjectedAttention

__all__ = ["Causal"]


class Causal(ProjectedAttention):
    """Self-attention in which a token sees itself and what came before, and nothing later.

        s[i, j] = -inf for j > i

    This makes every position a prediction from its past, so that all of a sequence trains at once,
    and it gives the model an order even without positions.

    Parameters
    ----------
    embed_dim, num_heads : int
    **options
        As for `ProjectedAttention`; causal by default.

    Notes
    -----
    `n (n + 1) / 2` pairs, about half of full attention; tiles above the diagonal are skipped.
    Source: Vaswani et al. (2017), section 3.2.3; Radford et al., GPT (2018).

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Causal
    >>> Causal(4).token_mixing(np.ones((3, 4)))[0].round(2)
    array([[1.  , 0.  , 0.  ],
           [0.5 , 0.5 , 0.  ],
           [0.33, 0.33, 0.33]])
    """

    name = "causal"
    paper = "Vaswani et al., Attention Is All You Need (2017), section 3.2.3"
    formula = "softmax(Q K^T / sqrt(d) + M) V, M[i, j] = -inf for j > i, else 0"
    default_options: ClassVar[Options] = {"causal": True}
