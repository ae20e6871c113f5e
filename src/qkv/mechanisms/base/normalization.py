"""Normalisations of rows, for arrays of any library."""

from __future__ import annotations

from typing import Any

from qkv.mechanisms.base.namespace import array_namespace

__all__ = ["l2_norm", "layer_norm", "rms_norm"]


def rms_norm(x: Any, epsilon: float) -> Any:
    """Rows divided by their root mean square: `x / sqrt(mean(x^2) + epsilon)`.

    Examples
    --------
    >>> import numpy as np
    >>> rms_norm(np.array([[2.0, 2.0, -2.0]]), 0.0)
    array([[ 1.,  1., -1.]])
    """
    xp = array_namespace(x)
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + epsilon)


def layer_norm(x: Any, epsilon: float) -> Any:
    """Rows of mean 0 and variance 1: `rms_norm(x - mean(x))`.

    Examples
    --------
    >>> import numpy as np
    >>> layer_norm(np.array([[1.0, 3.0]]), 0.0)
    array([[-1.,  1.]])
    """
    return rms_norm(x - array_namespace(x).mean(x, axis=-1, keepdims=True), epsilon)


def l2_norm(x: Any, epsilon: float) -> Any:
    """Rows of length one: `x / sqrt(sum(x^2) + epsilon)`.

    Examples
    --------
    >>> import numpy as np
    >>> l2_norm(np.array([[3.0, 4.0]]), 0.0)
    array([[0.6, 0.8]])
    """
    xp = array_namespace(x)
    return x / xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True) + epsilon)
