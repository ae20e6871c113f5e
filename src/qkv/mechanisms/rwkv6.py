"""RWKV-6 time mixing: linear attention whose state decays by what the tokens say."""

from __future__ import annotations

from typing import Any

from qkv.mechanisms.namespace import array_namespace

__all__ = ["chunk", "naive", "recurrent", "token_weights"]


def token_weights(receptance: Any, key: Any, log_decay: Any, bonus: Any) -> Any:
    """How much of the value of j reaches token i, (..., n, n); O(n^2 head_dim) memory."""
    xp = array_namespace(receptance)
    through = xp.cumulative_sum(log_decay, axis=-2)
    before = through - log_decay
    between = before[..., :, None, :] - through[..., None, :, :]
    past = xp.exp(xp.minimum(between, xp.zeros_like(between)))
    weights = xp.sum(receptance[..., :, None, :] * past * key[..., None, :, :], axis=-1)
    own = xp.sum(receptance * bonus * key, axis=-1)[..., None]
    return xp.tril(weights, k=-1) + xp.tril(xp.triu(own + xp.zeros_like(weights)))


def naive(receptance: Any, key: Any, value: Any, log_decay: Any, bonus: Any) -> Any:
    """The parallel form of the definition; see `chunk` for the shapes."""
    return token_weights(receptance, key, log_decay, bonus) @ value


def recurrent(
    receptance: Any, key: Any, value: Any, log_decay: Any, bonus: Any, state: Any = None
) -> tuple[Any, Any]:
    """The same token by token: `output[t] = receptance[t] (S[t-1] + (bonus key[t])^T value[t])`.

    Then `S[t] = exp(log_decay[t])^T S[t-1] + key[t]^T value[t]`, a decay for every row of S.
    """
    xp = array_namespace(receptance)
    state = key[..., :0, :].mT @ value[..., :0, :] if state is None else state
    decay = xp.exp(log_decay)
    rows = []
    for t in range(value.shape[-2]):
        now = slice(t, t + 1)
        r, k, v = receptance[..., now, :], key[..., now, :], value[..., now, :]
        rows.append(r @ (state + (bonus * k).mT @ v))
        state = decay[..., now, :].mT * state + k.mT @ v
    return xp.concat(rows, axis=-2), state


def chunk(
    receptance: Any,
    key: Any,
    value: Any,
    log_decay: Any,
    bonus: Any,
    state: Any = None,
    chunk_size: int = 64,
) -> tuple[Any, Any]:
    """The same in chunks of matrix products.

    Parameters
    ----------
    receptance, key : arrays (..., n, head_dim)
    value : array (..., n, v_head_dim)
    log_decay : array (..., n, head_dim)
        Zero or below.
    bonus : array (..., 1, head_dim)
        What the token's own key is multiplied by.
    state : array (..., head_dim, v_head_dim), optional
        What an earlier call returned.
    chunk_size : int
        A power of two.

    Returns
    -------
    output : array (..., n, v_head_dim)
    state : array (..., head_dim, v_head_dim)

    Notes
    -----
    O(n (chunk_size + head_dim) v_head_dim) operations. Every exponential is of zero or less.
    Source: Peng et al., "Eagle and Finch", arXiv 2404.05892, section 4; the chunks are those of
    Yang et al., "Gated linear attention", arXiv 2312.06635, section 4.
    """
    xp = array_namespace(receptance)
    state = key[..., :0, :].mT @ value[..., :0, :] if state is None else state
    n = value.shape[-2]
    # Tokens of zeros behind the last fill its chunk; their keys are zero and they do not decay.
    missing = -n % chunk_size
    padded = [_padded(a, missing) for a in (receptance, key, value, log_decay)]
    rows = []
    for start in range(0, n, chunk_size):
        r, k, v, log = (a[..., start : start + chunk_size, :] for a in padded)
        through = xp.cumulative_sum(log, axis=-2)
        before, last = through - log, through[..., -1:, :]
        own = xp.sum(r * bonus * k, axis=-1, keepdims=True) * v
        rows.append(own + _earlier_tokens(r, k, v, before, through) + (r * xp.exp(before)) @ state)
        state = xp.exp(last).mT * state + (k * xp.exp(last - through)).mT @ v
    return xp.concat(rows, axis=-2)[..., :n, :], state


def _earlier_tokens(r: Any, k: Any, v: Any, before: Any, through: Any) -> Any:
    """The part of each output that comes from earlier tokens of its chunk, by halves.

    The second half of the chunk reads the first in one matrix product, then the second half of
    each half reads its first, and so on. Decays are counted from where the halves meet, so that
    both factors of a product are exponentials of zero or less, however strong the decay.
    """
    xp = array_namespace(r)
    output = xp.zeros_like(v)
    half = v.shape[-2] // 2
    while half:
        late_r, late_before = (_halves(a, half)[..., 1, :, :] for a in (r, before))
        early_k, early_v, early_through = (_halves(a, half)[..., 0, :, :] for a in (k, v, through))
        meeting = early_through[..., -1:, :]
        query = late_r * xp.exp(late_before - meeting)
        key = early_k * xp.exp(meeting - early_through)
        read = query @ key.mT @ early_v
        both = xp.stack([xp.zeros_like(read), read], axis=-3)
        output = output + xp.reshape(both, output.shape)
        half //= 2
    return output


def _halves(a: Any, half: int) -> Any:
    """(..., n, d) as (..., n / (2 half), 2, half, d)."""
    return array_namespace(a).reshape(a, (*a.shape[:-2], -1, 2, half, a.shape[-1]))


def _padded(a: Any, rows: int) -> Any:
    if not rows:
        return a
    xp = array_namespace(a)
    zeros = xp.broadcast_to(xp.zeros_like(a[..., :1, :]), (*a.shape[:-2], rows, a.shape[-1]))
    return xp.concat([a, zeros], axis=-2)
