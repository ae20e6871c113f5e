"""Philox4x32-10: random bits that depend only on a seed and a counter.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.spec import Dropout

Array = NDArray[Any]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Array, Array, Array, Array]:
    """The four words of Philox4x32-10 for counters that broadcast with one another."""
    x0, x1, x2, x3 = (np.asarray(c).astype(np.uint64) for c in counter)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = x0 * np.uint64(MULTIPLIERS[0]), x2 * np.uint64(MULTIPLIERS[1])
        x0, x1, x2, x3 = (
            (b >> _HALF) ^ x1 ^ np.uint64(k0),
            b & _LOW,
            (a >> _HALF) ^ x3 ^ np.uint64(k1),
            a & _LOW,
        )
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return x0, x1, x2, x3


def dropout_factors(
    dropout: Dropout, batch: Any, head: Any, q_index: Any, kv_index: Any, dtype: np.dtype[Any]
) -> Array:
    """The factor of each weight: 0, or 1 / (1 - p)."""
    word = philox((kv_index, q_index, head, batch), dropout.seed)[0]
    is_kept = word >= dropout.p * 2.0**32
    return np.asarray(np.where(is_kept, dtype.type(1 / (1 - dropout.p)), dtype.type(0)))
