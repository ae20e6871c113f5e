"""One process: `python -m benchmarks.cache_steps.worker FRONT` prints its microseconds.

A step appends one token of 8 heads of 64 elements to a cache that holds some 100, and attends to
all of them. With "sequences", four have from 40 to 100 tokens.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FRONTS", "measured"]

Array = NDArray[Any]
Step = Callable[[Any, Any, Any], Any]

HEADS, DIM, KEYS, STEPS = 8, 64, 100, 40
LENGTHS = (40, 100, 60, 80)
"""Tokens of the sequences."""
_WARM = 4
_TOLERANCE = {"int8": 0.1, "": 1e-5}
"""Of outputs in float32, of inputs of unit variance; int8 keeps 8 bits of the largest in a row."""


def measured(front: str) -> dict[str, float]:
    """The microseconds of a step for each cache: the lower quartile of all steps."""
    return {
        f"{name}{', sequences' if lengths else ''}": _steps(make(), name, convert, lengths)
        for name, make, convert, several in FRONTS[front]()
        for lengths in ((None, LENGTHS) if several else (None,))
    }


def _steps(step: Step, name: str, convert: Callable[[Array], Any], lengths: Any) -> float:
    rng = np.random.default_rng(0)
    batch = 1 if lengths is None else len(lengths)
    counts = np.array([KEYS] if lengths is None else lengths)

    def drawn(tokens: int) -> Array:
        return rng.standard_normal((batch, HEADS, tokens, DIM), np.float32)

    keys, values = [drawn(KEYS)], [drawn(KEYS)]
    step(convert(keys[0]), convert(values[0]), None if lengths is None else counts)
    times = []
    for n in range(_WARM + STEPS):
        query, key, value = (drawn(1) for _ in range(3))
        keys.append(key)
        values.append(value)
        tensors = convert(query), convert(key), convert(value)
        began = time.perf_counter()
        out = step(*tensors)
        times.append(time.perf_counter() - began)
        if n in (0, _WARM, _WARM + STEPS - 1):
            every = np.concatenate(keys, axis=2), np.concatenate(values, axis=2)
            expected = _from_the_definition(query, *every, counts, n + 1)
            error = float(np.abs(np.asarray(out) - expected).max())
            if error > _TOLERANCE["int8" if "int8" in name else ""]:
                raise ValueError(f"{name} is off by {error:.1e}")
    return 1e6 * sorted(times[_WARM:])[STEPS // 4]


def _from_the_definition(
    query: Array, key: Array, value: Array, counts: Array, appended: int
) -> Array:
    q, k, v = (array.astype(np.float64) for array in (query, key, value))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(DIM)
    place = np.arange(k.shape[2])
    is_there = (place < counts[:, None]) | (place >= k.shape[2] - appended)
    weights = np.where(is_there[:, None, None], np.exp(scores), 0)
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


def _cache_step(cache: Any, query: Any, key: Any, value: Any = None) -> Any:
    """The first call has keys, values and lengths; the others a token."""
    if value is None or (isinstance(value, np.ndarray) and value.ndim == 1):
        return cache.append(query, key, value)
    return cache.append(key, value).attention(query)


def _caches(convert: Callable[[Array], Any]) -> list[tuple[str, Any, Any, bool]]:
    from qkv.cache import ContiguousCache, PagedCache, RollingCache

    caches: dict[str, Callable[[], Any]] = {
        "contiguous": ContiguousCache,
        "contiguous int8": partial(ContiguousCache, dtype="int8"),
        "paged": partial(PagedCache, page_size=16),
        "paged int8": partial(PagedCache, page_size=16, dtype="int8"),
        "rolling": partial(RollingCache, 1024),
        "rolling int8": partial(RollingCache, 1024, dtype="int8"),
    }
    return [
        (name, lambda make=make: partial(_cache_step, make()), convert, True)
        for name, make in caches.items()
    ]


def _of_numpy() -> list[tuple[str, Any, Any, bool]]:
    return _caches(lambda array: array)


def _of_torch() -> list[tuple[str, Any, Any, bool]]:
    import torch

    return _caches(torch.from_numpy)


def _of_sdpa() -> list[tuple[str, Any, Any, bool]]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def made() -> Step:
        held: list[Any] = []

        def step(query: Any, key: Any, value: Any) -> Any:
            if not held:
                held[:] = query, key
                return None
            held[:] = (torch.cat([a, b], dim=2) for a, b in zip(held, (key, value), strict=True))
            return scaled_dot_product_attention(query, *held)

        return step

    return [("contiguous", made, torch.from_numpy, False)]


FRONTS = {"qkv": _of_numpy, "qkv, tensors": _of_torch, "torch.cat and sdpa": _of_sdpa}


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1])))
