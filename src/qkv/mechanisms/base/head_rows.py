"""Rows of all heads side by side, and apart."""

from __future__ import annotations

from typing import Any

from qkv.mechanisms.base.attention_steps import token_lines
from qkv.mechanisms.base.explanation import ExplainedToken, Line
from qkv.mechanisms.base.namespace import array_namespace


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
    return namespace.moveaxis(apart, -2, -3)


def join_heads(heads: Any) -> Any:
    """`(..., num_heads, n, head_dim)` as `(..., n, num_heads * head_dim)`.

    Examples
    --------
    >>> import numpy as np
    >>> join_heads(np.zeros((3, 5, 4))).shape
    (5, 12)
    """
    namespace = array_namespace(heads)
    turned = namespace.moveaxis(heads, -3, -2)
    return namespace.reshape(turned, (*turned.shape[:-2], turned.shape[-2] * turned.shape[-1]))


def head_lines(token: ExplainedToken, query: Any, key: Any, value: Any) -> list[Line]:
    """The query of a token, and all keys and values, of all heads side by side."""
    q, k, v = map(join_heads, (query, key, value))
    lines = [Line(f"q of {token.name}", q[token.index].tolist())]
    for name, rows in (("k", k), ("v", v)):
        labels = [f"{name} of {kv_token}" for kv_token in token.kv_tokens]
        lines += token_lines(labels, rows)
    return lines
