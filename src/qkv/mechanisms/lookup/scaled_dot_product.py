"""Scaled dot-product attention, beside the class of the classical texts."""

from __future__ import annotations

from qkv.arguments.declarations import Size
from qkv.mechanisms.base.unprojected import UnprojectedAttention
from qkv.teaching.classical import ScaledDotProductAttention

__all__ = ["ScaledDotProduct"]


class ScaledDotProduct(UnprojectedAttention):
    """`softmax(Q K^T / sqrt(head_dim)) V`, which most other mechanisms are built on.

    Parameters
    ----------
    head_dim : int
        Length of query and key rows.

    Attributes
    ----------
    layer : qkv.ScaledDotProductAttention
        The class of the classical texts, which has a method for each step of the same.

    Notes
    -----
    About `4 n**2 head_dim` operations, no parameters. Source: Vaswani et al. (2017), section 3.2.1.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import ScaledDotProduct
    >>> x = np.eye(2)
    >>> ScaledDotProduct(2).token_mixing(x).round(3)
    array([[0.67, 0.33],
           [0.33, 0.67]])
    """

    name = "scaled-dot-product"
    paper = "Vaswani et al., Attention Is All You Need (2017), section 3.2.1"
    formula = "softmax(Q K^T / sqrt(d)) V"

    def __init__(self, head_dim: Size) -> None:
        self.layer = ScaledDotProductAttention(head_dim)
        super().__init__(head_dim, scale=1 / self.layer.scale)
