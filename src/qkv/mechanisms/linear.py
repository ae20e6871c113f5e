"""Linear attention: a softmax replaced by a product of features, so that sums can be kept."""

from __future__ import annotations

from typing import Any

from qkv.mechanisms.namespace import array_namespace

__all__ = ["chunk", "naive", "recurrent", "token_weights"]


def token_weights(query: Any, key: Any, causal: bool) -> Any:
    """The weights `w[i,j] = query[i] . key[j] / sum_j query[i] . key[j]`, (..., n, n).

    Parameters
    ----------
    query, key : arrays (..., n, features)
        Features, already positive.
    causal : bool
        Whether row i stops at j = i.

    Examples
    --------
    >>> import numpy as np
    >>> token_weights(np.ones((2, 1)), np.ones((2, 1)), causal=True)
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    xp = array_namespace(query)
    products = query @ key.mT
    if causal:
        products = xp.tril(products)
    return products / xp.sum(products, axis=-1, keepdims=True)


def naive(query: Any, key: Any, value: Any, causal: bool) -> Any:
    """Linear attention through its n x n weights; O(n^2), the parallel form of the definition."""
    return token_weights(query, key, causal) @ value


def bidirectional(query: Any, key: Any, value: Any) -> Any:
    """Linear attention without a mask: one sum over all keys serves every query; O(n)."""
    return _divided(query @ (key.mT @ _with_ones(value)))


def recurrent(query: Any, key: Any, value: Any, state: Any = None) -> tuple[Any, Any]:
    """Causal linear attention token by token, as decoding does it.

    Parameters
    ----------
    query, key : arrays (..., n, features)
    value : array (..., n, v_head_dim)
    state : array (..., features, v_head_dim + 1), optional
        What an earlier call returned: `sum_j key[j]^T [value[j], 1]` over the tokens before.

    Returns
    -------
    output : array (..., n, v_head_dim)
    state : array
        With the tokens of this call.
    """
    xp = array_namespace(query)
    value = _with_ones(value)
    state = _no_tokens(key, value) if state is None else state
    rows = []
    for t in range(query.shape[-2]):
        now = slice(t, t + 1)
        state = state + key[..., now, :].mT @ value[..., now, :]
        rows.append(query[..., now, :] @ state)
    return _divided(xp.concat(rows, axis=-2)), state


def chunk(
    query: Any, key: Any, value: Any, state: Any = None, chunk_size: int = 64
) -> tuple[Any, Any]:
    """Causal linear attention in chunks of matrix products; what `recurrent` gives.

    Within a chunk it is the parallel form, and everything before the chunk is in the state.

    Notes
    -----
    O(n (chunk_size + features) (features + v_head_dim)) operations.
    """
    xp = array_namespace(query)
    value = _with_ones(value)
    state = _no_tokens(key, value) if state is None else state
    rows = []
    for start in range(0, query.shape[-2], chunk_size):
        now = slice(start, start + chunk_size)
        q, k, v = query[..., now, :], key[..., now, :], value[..., now, :]
        rows.append(xp.tril(q @ k.mT) @ v + q @ state)
        state = state + k.mT @ v
    return _divided(xp.concat(rows, axis=-2)), state


def _with_ones(value: Any) -> Any:
    """A column of ones behind the values, whose weighted sum is the denominator."""
    xp = array_namespace(value)
    return xp.concat([value, xp.ones_like(value[..., :1])], axis=-1)


def _divided(sums: Any) -> Any:
    return sums[..., :-1] / sums[..., -1:]


def _no_tokens(key: Any, value: Any) -> Any:
    """The state before the first token: a sum over no rows, in the library of its inputs."""
    return key[..., :0, :].mT @ value[..., :0, :]
