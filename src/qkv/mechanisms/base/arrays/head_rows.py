"""Rows of all heads side by side, and apart."""

from __future__ import annotations

from typing import Any

from qkv.mechanisms.base.arrays.namespace import array_namespace, with_axis_moved

__all__ = ["join_heads", "split_heads"]


def split_heads(rows: Any, num_heads: int) -> Any:
    """`(..., n, num_heads * head_dim)` as `(..., num_heads, n, head_dim)`.

    Examples
    --------
    >>> import numpy as np
    >>> split_heads(np.zeros((5, 12)), 3).shape
    (3, 5, 4)
    """
    namespace = array_namespace(rows)
    width = rows.shape[-1] // num_heads
    apart = namespace.reshape(rows, (*rows.shape[:-1], num_heads, width))
    return with_axis_moved(apart, -2, -3)


def join_heads(heads: Any) -> Any:
    """`(..., num_heads, n, head_dim)` as `(..., n, num_heads * head_dim)`.

    Examples
    --------
    >>> import numpy as np
    >>> join_heads(np.zeros((3, 5, 4))).shape
    (5, 12)
    """
    namespace = array_namespace(heads)
    turned = with_axis_moved(heads, -3, -2)
    return namespace.reshape(turned, (*turned.shape[:-2], turned.shape[-2] * turned.shape[-1]))
