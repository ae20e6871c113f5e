"""The gated delta rule: a state that is corrected by what it gets wrong, and decays."""

from __future__ import annotations

from typing import Any

from qkv.mechanisms.base.arrays.namespace import array_namespace
from qkv.mechanisms.linear_time.recurrences.chunks import (
    causal_product,
    decays_between,
    finite_part,
    in_chunks,
    state_of_no_tokens,
)

__all__ = ["chunk", "inverse_of_unit_lower", "recurrent", "token_weights"]


def token_weights(query: Any, key: Any, log_decay: Any, beta: Any) -> Any:
    """How much each value adds to each output after all corrections, (..., n, n); O(n^3).

    See `chunk` for the shapes.
    """
    xp = array_namespace(query)
    products = decays_between(log_decay)
    reads = xp.tril(beta[..., None] * (key @ key.mT) * products, k=-1)
    seen = query @ key.mT * products
    return xp.tril(causal_product(seen, inverse_of_unit_lower(reads)) * beta[..., None, :])


def recurrent(
    query: Any, key: Any, value: Any, log_decay: Any, beta: Any, state: Any = None
) -> tuple[Any, Any]:
    """The gated delta rule token by token; see `chunk` for the shapes.

    `S' = exp(log_decay[t]) S[t-1]`, `S[t] = S' + beta[t] key[t]^T (value[t] - key[t] S')` and
    `output[t] = query[t] S[t]`.
    """
    xp = array_namespace(query)

    def token(state: Any, q: Any, k: Any, v: Any, log: Any, b: Any) -> tuple[Any, Any]:
        state = xp.exp(log) * state
        state = state + k.mT @ (b * (v - k @ state))
        return q @ state, state

    rows = (query, key, value, log_decay[..., None], beta[..., None])
    return in_chunks(token, rows, state_of_no_tokens(key, value) if state is None else state, 1)


def chunk(
    query: Any,
    key: Any,
    value: Any,
    log_decay: Any,
    beta: Any,
    state: Any = None,
    chunk_size: int = 64,
) -> tuple[Any, Any]:
    """The gated delta rule in chunks, by the WY representation of a product of reflections.

    What token i writes is `u[i] = beta[i] (value[i] - what the state holds for key[i])`, and the
    state holds what earlier tokens of the chunk wrote: a triangular system for all u of a chunk.

    Parameters
    ----------
    query, key : arrays (..., n, head_dim)
        Scaled and of length one.
    value : array (..., n, v_head_dim)
    log_decay : array (..., n)
        Zero or below.
    beta : array (..., n)
        How much of an error is corrected, from 0 to 1.
    state : array (..., head_dim, v_head_dim), optional
        What an earlier call returned.
    chunk_size : int

    Returns
    -------
    output : array (..., n, v_head_dim)
    state : array (..., head_dim, v_head_dim)

    Notes
    -----
    O(n chunk_size (chunk_size + head_dim + v_head_dim)) operations, and those of the state.
    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464, section 3.3.
    """
    xp = array_namespace(query)

    def tokens(state: Any, q: Any, k: Any, v: Any, log: Any, b: Any) -> tuple[Any, Any]:
        products = decays_between(log[..., 0])
        since_start, until_end = xp.exp(xp.cumulative_sum(log, axis=-2)), products[..., -1, :, None]
        reads = xp.tril(b * (k @ k.mT) * products, k=-1)
        errors = b * (v - since_start * (k @ state))
        written = causal_product(inverse_of_unit_lower(reads), errors)
        output = since_start * (q @ state) + causal_product(q @ k.mT * products, written)
        return output, since_start[..., -1:, :] * state + k.mT @ (until_end * written)

    rows = (query, key, value, log_decay[..., None], beta[..., None])
    state = state_of_no_tokens(key, value) if state is None else state
    return in_chunks(tokens, rows, state, chunk_size)


def inverse_of_unit_lower(lower: Any) -> Any:
    """`(I + lower)^-1` for a strictly lower triangular matrix, by halves.

    With the halves a and c on the diagonal and b below, the inverse has a^-1 and c^-1 on the
    diagonal and `-c^-1 b a^-1` below. Both halves are inverted in one call.

    Parameters
    ----------
    lower : array (..., n, n)

    Returns
    -------
    array (..., n, n)
        Rows before the first that is not finite are right; later ones are NaN, on both sides of
        the diagonal.

    Notes
    -----
    O(n^3) operations in O(log n) calls. A power series in `lower` would have terms of the size of
    binomial coefficients, which cancel and leave nothing correct.

    Examples
    --------
    >>> import numpy as np
    >>> inverse_of_unit_lower(np.array([[0.0, 0.0], [3.0, 0.0]]))
    array([[ 1.,  0.],
           [-3.,  1.]])
    """
    xp = array_namespace(lower)
    finite, spoiled = finite_part(lower)
    inverse = _inverse_of_finite(finite)
    if spoiled is None:
        return inverse
    return inverse + xp.cumulative_sum(xp.sum(spoiled, axis=-1, keepdims=True), axis=-2)


def _inverse_of_finite(lower: Any) -> Any:
    xp = array_namespace(lower)
    n = lower.shape[-1]
    if n == 1:
        return xp.ones_like(lower)
    half = n // 2
    if n % 2:
        inner = _inverse_of_finite(lower[..., :-1, :-1])
        edge = lower[..., -1:, :]
        top = xp.concat([inner, xp.zeros_like(inner[..., :1])], axis=-1)
        last = xp.concat([-edge[..., :-1] @ inner, xp.ones_like(edge[..., :1])], axis=-1)
        return xp.concat([top, last], axis=-2)
    upper_left, lower_right = lower[..., :half, :half], lower[..., half:, half:]
    both = _inverse_of_finite(xp.stack([upper_left, lower_right]))
    a, c = both[0, ...], both[1, ...]
    b = -c @ lower[..., half:, :half] @ a
    top = xp.concat([a, xp.zeros_like(b)], axis=-1)
    return xp.concat([top, xp.concat([b, c], axis=-1)], axis=-2)
