"""Variants as a user would write them, in a file that qkv knows nothing of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass(frozen=True, eq=False)
class Decay:
    """`score - rate[head] * abs(q_pos - kv_pos)`; declares all that there is to declare."""

    rate: Any

    roles: ClassVar = {"rate": "value"}
    positions_only: ClassVar = True
    uses_batch_index: ClassVar = False

    def lower(self, builder):
        rate = builder.per_head(self.rate, "rate")
        builder.mod(builder.score - rate * abs(builder.q_pos - builder.kv_pos))


class Near:
    """Keys at most `reach` positions behind: a plain object that declares how it is read."""

    roles: ClassVar = {"reach": "static"}
    positions_only = True

    def __init__(self, reach):
        self.reach = reach

    def lower(self, builder):
        behind = builder.q_pos - builder.kv_pos
        builder.mask((behind >= 0) & (behind <= self.reach))


class Undeclared:
    """The same, which declares nothing."""

    def __init__(self, reach):
        self.reach = reach

    lower = Near.lower


def near(reach, q_len, kv_len):
    """Which pairs `Near` allows, the last query at the last key."""
    behind = np.arange(q_len)[:, None] + kv_len - q_len - np.arange(kv_len)
    return (behind >= 0) & (behind <= reach)


def attention(query, key, value, rate=None, allowed=None):
    """The definition in float64, the last query at the last key."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    groups = query.shape[-3] // key.shape[-3]
    key, value = (np.repeat(a, groups, axis=-3) for a in (key, value))
    q_len, kv_len = query.shape[-2], key.shape[-2]
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    if rate is not None:
        distance = np.arange(q_len)[:, None] + kv_len - q_len - np.arange(kv_len)
        scores = scores - np.asarray(rate, np.float64)[:, None, None] * abs(distance)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value
