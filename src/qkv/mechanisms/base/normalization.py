"""Normalisations of rows, for arrays of any library."""

from __future__ import annotations

from typing import Any

from qkv.mechanisms.base.namespace import array_namespace

__all__ = ["l2_norm", "layer_norm", "rms_norm", "weighted_rms_norm"]


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


def weighted_rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
    """`weight * rms_norm(x)`, computed in float32 for types of 16 bits, in the type of `x`.

    Squares of float16 numbers above 255 overflow, so sums of them need the wider type.

    Examples
    --------
    >>> import numpy as np
    >>> weighted_rms_norm(np.array([[300.0, -300.0]], np.float16), np.float16(2.0), 0.0)
    array([[ 2., -2.]], dtype=float16)
    """
    xp = array_namespace(x)
    narrow = str(x.dtype).removeprefix("torch.") in ("float16", "bfloat16")
    wide = xp.astype(x, xp.float32, copy=False) if narrow else x
    return xp.astype(rms_norm(wide, epsilon) * weight, x.dtype, copy=False)


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
