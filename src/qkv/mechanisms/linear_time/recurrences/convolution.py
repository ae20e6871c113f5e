"""The short causal convolution in front of Mamba and gated delta networks."""

from __future__ import annotations

from typing import Any

from qkv.mechanisms.base.arrays.namespace import array_namespace

__all__ = ["causal_convolution"]


def causal_convolution(x: Any, weight: Any, before: Any, bias: Any = None) -> tuple[Any, Any]:
    """Mix each channel with its own last few values: `y[t] = sum_j weight[:, j] * x[t-K+1+j]`.

    Parameters
    ----------
    x : array (..., n, channels)
    weight : array (channels, 1, K)
        As that of `torch.nn.Conv1d(channels, channels, K, groups=channels)`.
    before : array (..., K - 1, channels)
        The rows before the first of x; zeros at the start of a sequence.
    bias : array (channels,), optional

    Returns
    -------
    y : array (..., n, channels)
    before : array (..., K - 1, channels)
        For the rows that follow.

    Notes
    -----
    2 n K operations a channel.

    Examples
    --------
    >>> import numpy as np
    >>> x, weight = np.array([[1.0], [2.0], [3.0]]), np.array([[[10.0, 1.0]]])
    >>> causal_convolution(x, weight, np.zeros((1, 1)))
    (array([[ 1.],
           [12.],
           [23.]]), array([[3.]]))
    """
    size, n = weight.shape[-1], x.shape[-2]
    xp = array_namespace(x)
    rows = xp.concat([xp.astype(before, x.dtype, copy=False), x], axis=-2)
    total = sum(rows[..., j : j + n, :] * weight[:, 0, j] for j in range(size))
    return total if bias is None else total + bias, rows[..., n:, :]
