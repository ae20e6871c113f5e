"""`Partial(out, lse)`: attention over some of the keys, and how such parts join.

Partials form a commutative monoid: `merge` is associative up to rounding, and (0, -inf) is its
identity. Splitting keys, streaming, paged caches and rings are all this one operation. Source:
Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Partial:
    """`out` is `(..., q_len, v_head_dim)`, `lse` `(..., q_len)`, of one floating type.

    `lse_rest` is the rounding error of lse: `exp((s - lse) - lse_rest)` are weights as exact as
    those of the forward pass. It is set only if the scores were computed in the same order as the
    backward pass of the same backend computes them. `unrounded` is `out` before it was rounded to
    16 bits: the rounding error of `out` would become an error of the gradients.
    """

    out: Array
    lse: Array
    lse_rest: Array | None = None
    unrounded: Array | None = None


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Entropy in nats, largest score and largest weight of each row `(..., q_len)`.

    `lse = max_score - log(max_weight)`, as long as no sink takes a share.
    """

    entropy: Array
    max_score: Array
    max_weight: Array


LSE_ROUNDING = 4e-6
"""Relative error of a weight, from the rounding of lse, beyond which a row is summed again."""


def coarse(lse: Array, rounding: float = LSE_ROUNDING) -> Array:
    """Whether the lse of each row is so large that its rounding would change `exp(s - lse)`."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(lse) * np.finfo(lse.dtype).eps > rounding)


def identity(shape: tuple[int, ...], dtype: Any) -> Partial:
    """Attention over no keys; `shape` is that of `out`."""
    return Partial(np.zeros(shape, dtype), np.full(shape[:-1], -np.inf, dtype))


def without_keys(shape: tuple[int, ...], dtype: Any) -> RowStatistics:
    """Statistics of rows that see no key."""
    lowest = np.full(shape, -np.inf, dtype)
    return RowStatistics(np.zeros(shape, dtype), lowest, np.zeros(shape, dtype))


def merge(parts: Sequence[Partial], xp: Any = np) -> Partial:
    """Attention over the union of the parts' keys: out weighted by exp(lse_i - lse).

    `xp` is the module of the arrays' functions: numpy, torch or jax.numpy, which differentiate what
    is computed here.
    """
    peak = reduce(xp.maximum, [part.lse for part in parts])
    empty = peak == -math.inf
    # A part without keys adds nothing, even if its output holds NaN. One whose share only
    # underflows has keys, and a NaN of theirs has to remain.
    unseen = [part.lse == -math.inf for part in parts]
    with np.errstate(all="ignore"):
        shift = xp.where(empty, 0, peak)
        shares = [
            xp.where(none, 0, xp.exp(xp.where(none, shift, part.lse) - shift))
            for part, none in zip(parts, unseen, strict=True)
        ]
        # For rows without keys in every part, log(0) would have the derivative NaN.
        total = xp.where(empty, 1, reduce(operator.add, shares))
        lse = xp.where(empty, peak, shift + xp.log(total))
        half: Any = 0
        for part, share, none in zip(parts, shares, unseen, strict=True):
            # Chosen before it is multiplied, since a derivative of 0 times NaN would be NaN too.
            half = (
                half + xp.where(none[..., None], 0, part.out) * (0.5 * (share / total))[..., None]
            )
        # Shares may add up to a little more than one, which would make the largest number infinite.
        limits = xp.finfo(half.dtype)
        rounding = (len(parts) + 1) * float(limits.eps)
        is_over = abs(half) > float(limits.max) / 2
        out = xp.where(is_over, half * (2 - 2 * rounding), half * 2)
    return Partial(out, lse)


def finish(partial: Partial, sinks: Array | None) -> Partial:
    """Let the sinks `(num_heads,)` take their share of the denominator; `lse` is `(..., heads, q)`.

    A row without keys keeps out = 0 and gets lse = sink.
    """
    if sinks is None:
        return partial
    dtype = partial.lse.dtype
    with np.errstate(all="ignore"):
        of_keys, sink = partial.lse.astype(np.float64), sinks.astype(np.float64)[:, None]
        if partial.lse_rest is not None:
            of_keys = of_keys + partial.lse_rest
        # Not exp(lse - new lse), because the difference of two large numbers has lost digits.
        share = np.where(np.isneginf(of_keys), 0, 1 / (1 + np.exp(sink - of_keys)))
        peak = np.maximum(of_keys, sink)
        log_sum = np.where(np.isneginf(peak), 0, np.log1p(np.exp(-np.abs(of_keys - sink))))
        lse = (peak + log_sum).astype(dtype)
        rest = None if partial.lse_rest is None else rest_of(peak, log_sum, lse)
    share = share[..., None].astype(dtype)
    unrounded = None if partial.unrounded is None else partial.unrounded * share
    return Partial(partial.out * share, lse, rest, unrounded)


def rest_of(row_max: Array, log_sum: Array, lse: Array) -> Array:
    """The rounding error of `lse = row_max + log_sum`, in its type; 0 where lse is infinite."""
    with np.errstate(invalid="ignore"):
        rest = np.where(np.isinf(lse), 0, (row_max - lse.astype(np.float64)) + log_sum)
    return rest.astype(lse.dtype)


def share_with_sinks(rows: RowStatistics, sinks: Array | None) -> RowStatistics:
    """Statistics over the keys of rows in which the sinks `(num_heads,)` take their share.

    Every weight is multiplied by the share of the keys, c, so that

        entropy = c (entropy of the keys alone - log c),   c = 1 / (1 + exp(sink - lse of the keys))
    """
    if sinks is None:
        return rows
    with np.errstate(all="ignore"):
        # Not `max_score - log(max_weight)`, because a large score would have rounded away the log.
        sink = sinks.astype(rows.entropy.dtype)[:, None]
        log_share = -np.logaddexp(0, (sink - rows.max_score) + np.log(rows.max_weight))
        share = np.where(rows.max_weight == 0, 0, np.exp(log_share))
        entropy = np.where(share == 0, 0, share * (rows.entropy - log_share))
    return RowStatistics(entropy, rows.max_score, share * rows.max_weight)
