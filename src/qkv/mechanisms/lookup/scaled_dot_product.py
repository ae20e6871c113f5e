"""Scaled dot-product attention, through the class of the classical texts."""

from __future__ import annotations

from typing import Any

from qkv.arguments.declarations import Size
from qkv.mechanisms.base.arrays.namespace import like, values
from qkv.mechanisms.base.arrays.rows import Rows
from qkv.mechanisms.base.unprojected import UnprojectedAttention
from qkv.teaching.classical import ScaledDotProductAttention

__all__ = ["ScaledDotProduct"]


class ScaledDotProduct(UnprojectedAttention):
    """`softmax(Q K^T / sqrt(head_dim)) V`, with the weights of `qkv.ScaledDotProductAttention`.

    Parameters
    ----------
    head_dim : int
        Length of query and key rows.

    Attributes
    ----------
    layer : qkv.ScaledDotProductAttention
        The class of the classical texts, which has a method for each step.

    Notes
    -----
    `4 n**2 head_dim` operations, no parameters. Source: Vaswani et al. (2017), section 3.2.1.

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

    def token_mixing(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
        """The attention weights `(..., q_len, kv_len)`; values only, without a gradient.

        Parameters
        ----------
        x, key, value : array
            As for a call.
        """
        weights, _ = self.layer(*(values(array, "x") for array in self.sequences(x, key, value)))
        return like(weights, x)
