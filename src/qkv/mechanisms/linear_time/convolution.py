"""The short causal convolution in front of Mamba and gated delta networks."""

from __future__ import annotations

from typing import Any

from qkv.mechanisms.base.namespace import array_namespace

__all__ = ["causal_convolution"]


def causal_convolution(x: Any, weight: Any, bias: Any = None) -> Any:
    """Mix each channel with its own last few values: `y[t] = sum_j weight[:, j] * x[t-K+1+j]`.

    What lies before the first token is zero.

    Parameters
    ----------
    x : array (..., n, channels)
    weight : array (channels, 1, K)
        As that of `torch.nn.Conv1d(channels, channels, K, groups=channels)`.
    bias : array (channels,), optional

    Returns
    -------
    array (..., n, channels)

    Notes
    -----
    2 n K operations a channel.

    Examples
    --------
    >>> import numpy as np
    >>> causal_convolution(np.array([[1.0], [2.0], [3.0]]), np.array([[[10.0, 1.0]]]))
    array([[ 1.],
           [12.],
           [23.]])
    """
    xp = array_namespace(x)
    size, n = weight.shape[-1], x.shape[-2]
    total = x * weight[:, 0, -1]
    for back in range(1, min(size, n)):
        moved = x[..., : n - back, :]
        before = xp.zeros_like(x[..., :back, :])
        total = total + xp.concat([before, moved], axis=-2) * weight[:, 0, size - 1 - back]
    return total if bias is None else total + bias
