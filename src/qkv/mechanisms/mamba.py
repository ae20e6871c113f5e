"""Mamba: a state space model whose step, input and output depend on the token."""

from __future__ import annotations

from typing import Any

from qkv.mechanisms.namespace import array_namespace
from qkv.mechanisms.scan import linear_scan

__all__ = ["chunk", "recurrent", "token_weights"]


def token_weights(step: Any, a: Any, b: Any, c: Any) -> Any:
    """How much of the input of token j reaches token i, (..., channels, n, n).

    `M[i,j] = sum_s c[i,s] exp(a[s] (step[j+1] + ... + step[i])) step[j] b[j,s]` in each channel.

    Notes
    -----
    O(n^2 channels state_size) memory.
    Source: Ali et al., "The hidden attention of Mamba models", arXiv 2403.01590.
    """
    xp = array_namespace(step)
    total = xp.cumulative_sum(step, axis=-2)
    between = xp.moveaxis(total[..., :, None, :] - total[..., None, :, :], -1, -3)
    between = xp.tril(between)[..., None]
    pairs = c[..., None, :, None, :] * b[..., None, None, :, :]
    weights = xp.sum(xp.exp(between * a[:, None, None, :]) * pairs, axis=-1)
    return xp.tril(weights) * step.mT[..., None, :]


def recurrent(x: Any, step: Any, a: Any, b: Any, c: Any, state: Any = None) -> tuple[Any, Any]:
    """The selective scan token by token; see `chunk` for the shapes."""
    xp = array_namespace(x)
    rows = []
    for t in range(x.shape[-2]):
        dt = step[..., t, :, None]
        increment = dt * x[..., t, :, None] * b[..., t, None, :]
        state = increment if state is None else xp.exp(dt * a) * state + increment
        rows.append(xp.sum(state * c[..., t, None, :], axis=-1))
    return xp.stack(rows, axis=-2), state


def chunk(
    x: Any, step: Any, a: Any, b: Any, c: Any, state: Any = None, chunk_size: int = 64
) -> tuple[Any, Any]:
    """The selective scan in chunks: a parallel scan within a chunk, a state between chunks.

    `h[t] = exp(step[t] a) h[t-1] + step[t] x[t] b[t]` and `output[t] = sum_s c[t,s] h[t,s]`.

    Parameters
    ----------
    x, step : arrays (..., n, channels)
        Inputs, and how long each of them acts.
    a : array (channels, state_size)
        Below zero.
    b, c : arrays (..., n, state_size)
    state : array (..., channels, state_size), optional
        What an earlier call returned.
    chunk_size : int

    Returns
    -------
    output : array (..., n, channels)
    state : array (..., channels, state_size)

    Notes
    -----
    O(n channels state_size) operations, and memory for the states of one chunk. Each state of a
    channel decays at its own rate, so that a chunk is no matrix product as it is in Mamba-2.
    Source: Gu and Dao, "Mamba", arXiv 2312.00752, algorithm 2.
    """
    xp = array_namespace(x)
    # Scans run along axis 0.
    x, step, b, c = (xp.moveaxis(array, -2, 0) for array in (x, step, b, c))
    scaled = step * x
    rows = []
    for start in range(0, x.shape[0], chunk_size):
        now = slice(start, start + chunk_size)
        decay = xp.exp(step[now, ..., None] * a)
        increment = scaled[now, ..., None] * b[now, ..., None, :]
        if state is not None:
            first = decay[:1, ...] * state + increment[:1, ...]
            increment = xp.concat([first, increment[1:, ...]])
        states = linear_scan(decay, increment)
        state = states[-1, ...]
        rows.append((states @ c[now, ..., None])[..., 0])
    return xp.moveaxis(xp.concat(rows), 0, -2), state
