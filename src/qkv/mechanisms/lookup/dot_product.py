"""Dot-product attention without a scale."""

from __future__ import annotations

from qkv.arguments.declarations import Size
from qkv.mechanisms.base.unprojected import UnprojectedAttention

__all__ = ["DotProduct"]


class DotProduct(UnprojectedAttention):
    """`softmax(Q K^T) V`: scores are dot products as they are.

    Their variance grows with head_dim, so that for long rows the softmax comes close to an arg max
    and its gradient vanishes; `ScaledDotProduct` divides by `sqrt(head_dim)`.

    Parameters
    ----------
    head_dim : int
        Length of query and key rows.

    Notes
    -----
    About `4 n**2 head_dim` operations, no parameters. Source: Luong et al., "Effective Approaches
    to Attention-based Neural Machine Translation" (2015), the score "dot".

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import DotProduct
    >>> x = np.eye(2)
    >>> DotProduct(2).token_mixing(x).round(3)
    array([[0.731, 0.269],
           [0.269, 0.731]])
    """

    name = "dot-product"
    paper = "Luong et al., Effective Approaches to Attention-based NMT (2015)"
    formula = "softmax(Q K^T) V"

    def __init__(self, head_dim: Size) -> None:
        super().__init__(head_dim, scale=1.0)
