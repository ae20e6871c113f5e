"""RWKV-4 time mixing: a softmax over the past in every channel, with a decay in place of queries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from qkv.mechanisms.namespace import array_namespace, like

__all__ = ["chunk", "distance_bias", "recurrent", "token_weights"]


def distance_bias(decay: Any, bonus: Any, rows: int, columns: int) -> Any:
    """What is added to key j for the output of token i, in every channel.

    `-(i - 1 - j) decay` for j < i, `bonus` for j = i, and -inf for j > i.

    Parameters
    ----------
    decay, bonus : arrays (channels,)
    rows, columns : int

    Returns
    -------
    array (rows, columns, channels)

    Examples
    --------
    >>> distance_bias(np.array([0.5]), np.array([3.0]), 3, 3)[..., 0]
    array([[ 3. , -inf, -inf],
           [-0. ,  3. , -inf],
           [-0.5, -0. ,  3. ]])
    """
    xp = array_namespace(decay)
    steps = np.arange(rows)[:, None, None] - np.arange(columns)[:, None]
    back = like(np.maximum(steps - 1, 0), decay)
    past = -back * decay + like(np.where(steps < 0, -math.inf, 0.0), decay)
    return xp.where(like(steps, decay) == 0, bonus, past)


def token_weights(key: Any, decay: Any, bonus: Any) -> Any:
    """The softmax weights of every channel, (..., channels, n, n); O(n^2 channels)."""
    xp = array_namespace(key)
    n = key.shape[-2]
    scores = key[..., None, :, :] + distance_bias(decay, bonus, n, n)
    weights = xp.exp(scores - xp.max(scores, axis=-2, keepdims=True))
    weights = weights / xp.sum(weights, axis=-2, keepdims=True)
    return xp.moveaxis(weights, -1, -3)


def recurrent(
    key: Any, value: Any, decay: Any, bonus: Any, state: tuple[Any, Any, Any] | None = None
) -> tuple[Any, tuple[Any, Any, Any]]:
    """The weighted mean of values token by token; see `chunk` for the shapes."""
    xp = array_namespace(key)
    numerator, denominator, largest = _no_tokens(key) if state is None else state
    rows = []
    for t in range(key.shape[-2]):
        k, v = key[..., t, :], value[..., t, :]
        top = xp.maximum(largest, k + bonus)
        past, own = xp.exp(largest - top), xp.exp(k + bonus - top)
        rows.append((past * numerator + own * v) / (past * denominator + own))
        top = xp.maximum(largest - decay, k)
        past, own = xp.exp(largest - decay - top), xp.exp(k - top)
        numerator, denominator = past * numerator + own * v, past * denominator + own
        largest = top
    return xp.stack(rows, axis=-2), (numerator, denominator, largest)


def chunk(
    key: Any,
    value: Any,
    decay: Any,
    bonus: Any,
    state: tuple[Any, Any, Any] | None = None,
    chunk_size: int = 16,
) -> tuple[Any, tuple[Any, Any, Any]]:
    """The same, one chunk of tokens at a time: the scores of all pairs of a chunk, and the state.

    Parameters
    ----------
    key, value : arrays (..., n, channels)
    decay : array (channels,)
        What a key loses for every token after it, above zero.
    bonus : array (channels,)
        What is added to the key of the token itself.
    state : tuple of arrays (..., channels), optional
        What an earlier call returned: the sums of weighted values and of weights, both divided by
        the exponential of the third, the largest score.
    chunk_size : int

    Returns
    -------
    output : array (..., n, channels)
    state : tuple of arrays

    Notes
    -----
    O(n chunk_size channels) operations. Every exponential is of zero or less.
    Source: Peng et al., "RWKV", arXiv 2305.13048, equations 16 to 18 and appendix D.
    """
    xp = array_namespace(key)
    numerator, denominator, largest = _no_tokens(key) if state is None else state
    n = key.shape[-2]
    size = min(chunk_size, n)
    # The row behind the last token of a chunk has no key of its own: it is the next state.
    bias = distance_bias(decay, bonus, size + 1, size)
    faded = -like(np.arange(size + 1)[:, None], key) * decay
    rows = []
    for start in range(0, n, size):
        k, v = key[..., start : start + size, :], value[..., start : start + size, :]
        m = k.shape[-2]
        scores = k[..., None, :, :] + bias[: m + 1, :m, :]
        before = largest[..., None, :] + faded[: m + 1, :]
        top = xp.maximum(xp.max(scores, axis=-2), before)
        past, weights = xp.exp(before - top), xp.exp(scores - top[..., None, :])
        above = past * numerator[..., None, :] + xp.sum(weights * v[..., None, :, :], axis=-2)
        below = past * denominator[..., None, :] + xp.sum(weights, axis=-2)
        rows.append(above[..., :m, :] / below[..., :m, :])
        numerator, denominator, largest = above[..., m, :], below[..., m, :], top[..., m, :]
    return xp.concat(rows, axis=-2), (numerator, denominator, largest)


def _no_tokens(key: Any) -> tuple[Any, Any, Any]:
    zeros = array_namespace(key).zeros_like(key[..., 0, :])
    return zeros, zeros, zeros - math.inf
