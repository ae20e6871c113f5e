"""`Partial(out, lse)`: attention over some of the keys, and how such parts join.

Partials form a commutative monoid: `merge` is associative up to rounding, and (0, -inf) is its
identity. Splitting keys, streaming, paged caches and rings are all this one operation. Source:
Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Partial:
    """`out` is `(..., q_len, v_head_dim)`, `lse` `(..., q_len)`, of one floating type."""

    out: Array
    lse: Array


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Of each row, over the keys alone: entropy in nats and the largest score, `(..., q_len)`."""

    entropy: Array
    max_score: Array


def identity(shape: tuple[int, ...], dtype: Any) -> Partial:
    """Attention over no keys; `shape` is that of `out`."""
    return Partial(np.zeros(shape, dtype), np.full(shape[:-1], -np.inf, dtype))


def merge(parts: Sequence[Partial]) -> Partial:
    """Attention over the union of the parts' keys: out weighted by exp(lse_i - lse)."""
    peak = np.maximum.reduce([part.lse for part in parts])
    with np.errstate(all="ignore"):
        shift = np.where(np.isneginf(peak), 0, peak)
        shares = [np.exp(part.lse - shift) for part in parts]
        total = np.add.reduce(shares)
        lse = np.where(np.isneginf(peak), peak, shift + np.log(total))
        out = np.zeros_like(parts[0].out)
        for part, share in zip(parts, shares, strict=True):
            weight = np.where(share == 0, 0, share / total)
            out = out + np.where(share[..., None] == 0, 0, part.out * weight[..., None])
    return Partial(out.astype(parts[0].out.dtype), lse.astype(parts[0].lse.dtype))


def finish(partial: Partial, sinks: Array | None) -> Partial:
    """Let the sinks `(num_heads,)` take their share of the denominator; `lse` is `(..., heads, q)`.

    A row without keys keeps out = 0 and gets lse = sink.
    """
    if sinks is None:
        return partial
    dtype = partial.lse.dtype
    with np.errstate(all="ignore"):
        lse = np.logaddexp(partial.lse, sinks.astype(dtype)[:, None]).astype(dtype)
        share = np.where(np.isneginf(partial.lse), 0, np.exp(partial.lse - lse))
    return Partial(partial.out * share[..., None].astype(dtype), lse)
