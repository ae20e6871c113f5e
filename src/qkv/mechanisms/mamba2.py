"""Mamba-2: a state space model that is also attention with a decaying mask."""

from __future__ import annotations

import math
from typing import Any

from qkv.mechanisms.namespace import array_namespace

__all__ = ["chunk", "decay_products", "naive", "recurrent"]


def decay_products(log_decay: Any) -> Any:
    """The matrix `L[i,j] = exp(log_decay[j+1] + ... + log_decay[i])` for j <= i, else 0.

    Parameters
    ----------
    log_decay : array (..., n)

    Returns
    -------
    array (..., n, n)

    Examples
    --------
    >>> import numpy as np
    >>> decay_products(np.log([0.5, 0.5, 0.5]))
    array([[1.  , 0.  , 0.  ],
           [0.5 , 1.  , 0.  ],
           [0.25, 0.5 , 1.  ]])
    """
    xp = array_namespace(log_decay)
    total = xp.cumulative_sum(log_decay, axis=-1)
    between = total[..., :, None] - total[..., None, :]
    allowed = xp.tril(xp.ones_like(between)) > 0
    # Above the diagonal the difference is positive: exp must not see it.
    return xp.exp(xp.where(allowed, between, xp.full_like(between, -math.inf)))


def naive(query: Any, key: Any, value: Any, log_decay: Any) -> Any:
    """`((query key^T) * L) value`: the dual, quadratic form; see `chunk` for the shapes."""
    return (query @ key.mT * decay_products(log_decay)) @ value


def recurrent(
    query: Any, key: Any, value: Any, log_decay: Any, state: Any = None
) -> tuple[Any, Any]:
    """The same token by token: `S[t] = exp(log_decay[t]) S[t-1] + key[t]^T value[t]`."""
    xp = array_namespace(query)
    state = key[..., :0, :].mT @ value[..., :0, :] if state is None else state
    decay = xp.exp(log_decay)[..., None]
    rows = []
    for t in range(value.shape[-2]):
        now = slice(t, t + 1)
        state = decay[..., now, :] * state + key[..., now, :].mT @ value[..., now, :]
        rows.append(query[..., now, :] @ state)
    return xp.concat(rows, axis=-2), state


def chunk(
    query: Any,
    key: Any,
    value: Any,
    log_decay: Any,
    state: Any = None,
    chunk_size: int = 64,
) -> tuple[Any, Any]:
    """State space duality in chunks: quadratic within a chunk, a state between chunks.

    Parameters
    ----------
    query, key : arrays (..., n, state_size)
        C and B of the paper.
    value : array (..., n, head_dim)
        Its X, each row multiplied by its time step.
    log_decay : array (..., n)
        Time step times A, zero or below.
    state : array (..., state_size, head_dim), optional
        What an earlier call returned.
    chunk_size : int

    Returns
    -------
    output : array (..., n, head_dim)
    state : array (..., state_size, head_dim)

    Notes
    -----
    O(n (chunk_size + state_size) (state_size + head_dim)) operations.
    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, section 6.
    """
    xp = array_namespace(query)
    state = key[..., :0, :].mT @ value[..., :0, :] if state is None else state
    rows = []
    for start in range(0, value.shape[-2], chunk_size):
        now = slice(start, start + chunk_size)
        q, k, v, log = query[..., now, :], key[..., now, :], value[..., now, :], log_decay[..., now]
        total = xp.cumulative_sum(log, axis=-1)[..., None]
        last = total[..., -1:, :]
        rows.append(naive(q, k, v, log) + xp.exp(total) * (q @ state))
        state = xp.exp(last) * state + k.mT @ (xp.exp(last - total) * v)
    return xp.concat(rows, axis=-2), state
