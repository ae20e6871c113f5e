"""Normalisations of rows, for arrays of any library.

They are computed in float32 for types of 16 bits: squares of float16 numbers above 255 overflow.
"""

from __future__ import annotations

from typing import Any

from qkv.mechanisms.base.arrays.namespace import array_namespace, widened

__all__ = ["l2_norm", "layer_norm", "rms_norm", "weighted_rms_norm"]


def rms_norm(x: Any, epsilon: float) -> Any:
    """Rows divided by their root mean square: `x / sqrt(mean(x^2) + epsilon)`.

    Examples
    --------
    >>> import numpy as np
    >>> rms_norm(np.array([[2.0, 2.0, -2.0]]), 0.0)
    array([[ 1.,  1., -1.]])
    >>> rms_norm(np.array([[300.0, -300.0]], np.float16), 0.0)
    array([[ 1., -1.]], dtype=float16)
    """
    return _narrowed(_rms_norm(widened(x), epsilon), x)


def weighted_rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
    """`weight * rms_norm(x)`, in the type of `x`.

    Examples
    --------
    >>> import numpy as np
    >>> weighted_rms_norm(np.array([[300.0, -300.0]], np.float16), np.float16(2.0), 0.0)
    array([[ 2., -2.]], dtype=float16)
    """
    return _narrowed(_rms_norm(widened(x), epsilon) * weight, x)


def layer_norm(x: Any, epsilon: float) -> Any:
    """Rows of mean 0 and variance 1: `rms_norm(x - mean(x))`.

    Examples
    --------
    >>> import numpy as np
    >>> layer_norm(np.array([[1.0, 3.0]]), 0.0)
    array([[-1.,  1.]])
    """
    wide = widened(x)
    mean = array_namespace(x).mean(wide, axis=-1, keepdims=True)
    return _narrowed(_rms_norm(wide - mean, epsilon), x)


def l2_norm(x: Any, epsilon: float) -> Any:
    """Rows of length one: `x / sqrt(sum(x^2) + epsilon)`.

    Examples
    --------
    >>> import numpy as np
    >>> l2_norm(np.array([[3.0, 4.0]]), 0.0)
    array([[0.6, 0.8]])
    """
    xp, wide = array_namespace(x), widened(x)
    return _narrowed(wide / xp.sqrt(xp.sum(wide * wide, axis=-1, keepdims=True) + epsilon), x)


def _rms_norm(x: Any, epsilon: float) -> Any:
    xp = array_namespace(x)
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + epsilon)


def _narrowed(rows: Any, x: Any) -> Any:
    return array_namespace(x).astype(rows, x.dtype, copy=False)
