"""What the mean of keys costs and saves in int8 caches: `python -m benchmarks.int8_means`.

A decoding step is one token that is appended and attends to all keys. Its time is that of the
processor on one thread, the best of all steps. Both caches take turns: one keeps its keys less the
mean of each head and channel, the other does not. Errors are beside the same attention in float64,
relative to the largest output.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import qkv
from qkv.cache import ContiguousCache, encoding

__all__ = ["main"]

HEADS, KV_HEADS, DIM = 32, 8, 128


def main() -> None:
    """Print both times and errors for each number of keys and each bias."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--bias", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    print(
        f"{'keys':>6} {'bias':>5}   {'step with':>10} {'without':>10}   {'error with':>10} without"
    )
    for keys in options.keys:
        for bias in options.bias:
            _compare(keys, bias, options.steps)


def _compare(keys: int, bias: float, steps: int) -> None:
    rng = np.random.default_rng(0)
    key, value = rng.normal(size=(2, 1, KV_HEADS, keys, DIM))
    of_channels = bias * rng.normal(size=(1, KV_HEADS, 1, DIM))
    key += of_channels
    query = rng.normal(size=(1, HEADS, 1, DIM)).astype(np.float32)
    exact = qkv.attention(query.astype(float), key, value, q_offset="end")
    token = [rows[:, :, -1:].astype(np.float32) for rows in (key, value)]
    prompt = [rows[:, :, :-1].astype(np.float32) for rows in (key, value)]
    caches = {with_mean: _cache(with_mean, *prompt) for with_mean in (True, False)}
    errors: dict[bool, float] = {}
    times: dict[bool, list[float]] = {True: [], False: []}
    for with_mean, cache in caches.items():
        out = cache.append(*token).attention(query)
        errors[with_mean] = np.abs(out - exact).max() / np.abs(exact).max()
    for n in range(steps):
        for with_mean, cache in list(caches.items())[:: 1 - 2 * (n % 2)]:
            began = time.process_time()
            cache.append(*token).attention(query)
            times[with_mean].append(time.process_time() - began)
    with_it, without = (1e6 * min(times[which]) for which in (True, False))
    print(
        f"{keys:6} {bias:5.0f}   {with_it:7.0f} us {without:7.0f} us   {errors[True]:10.5f} "
        f"{errors[False]:.5f}"
    )


def _cache(with_mean: bool, key: Any, value: Any) -> ContiguousCache:
    """A cache that holds a prompt; the mean is taken from the first append alone."""
    fewest = encoding.FEWEST_ROWS
    cache = ContiguousCache(capacity=2 * key.shape[2], dtype="int8")
    try:
        if not with_mean:
            encoding.FEWEST_ROWS = key.size
        cache.append(key, value)
    finally:
        encoding.FEWEST_ROWS = fewest
    return cache


if __name__ == "__main__":
    main()
