"""What papers and their code print, and the definitions need."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> Array:
    """Word 0 of Philox4x32-10, as printed by Salmon et al. (2011)."""
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    x = [np.asarray(c).astype(np.uint64) for c in counter]
    key = [seed % 2**32, seed >> 32]
    for _ in range(10):
        a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [
            (b >> half) ^ x[1] ^ np.uint64(key[0]),
            b & low,
            (a >> half) ^ x[3] ^ np.uint64(key[1]),
            a & low,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return x[0]


def t5_bucket(relative: Array, num_buckets: int, bidirectional: bool, far: int) -> Array:
    """The bucket of `kv_pos - q_pos`, in the float32 of T5's published code."""
    side = np.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        side = np.where(relative > 0, num_buckets, 0)
        relative = np.abs(relative)
    else:
        relative = np.maximum(-relative, 0)
    exact = num_buckets // 2
    with np.errstate(divide="ignore"):
        steps = np.log(relative.astype(np.float32) / np.float32(exact)) / np.float32(
            log(far / exact)
        )
    large = exact + np.where(relative < exact, 0, steps * np.float32(num_buckets - exact)).astype(
        int
    )
    return side + np.where(relative < exact, relative, np.minimum(large, num_buckets - 1))


def alibi_slopes(num_heads: int) -> list[float]:
    """The slopes of Press et al. (2022).

    Heads beyond a power of two have every other slope of the next power.
    """
    below = 1
    while 2 * below <= num_heads:
        below *= 2
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    return slopes + [2 ** (-8 * (2 * i + 1) / (2 * below)) for i in range(num_heads - below)]
