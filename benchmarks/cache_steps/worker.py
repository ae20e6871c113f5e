"""One process: `python -m benchmarks.cache_steps.worker FRONT` prints its microseconds.

A step appends one token of 8 heads of 64 elements to a cache that holds some 100, and attends to
all of them. With "sequences", four have from 40 to 100 tokens.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["FRONTS", "measured"]

Array = NDArray[Any]


class Held(Protocol):
    """Keys and values that a step adds to and attends to."""

    def begin(self, key: Any, value: Any, lengths: Array | None) -> None:
        """Hold the first tokens, of sequences of these lengths, or all of them."""
        ...

    def step(self, query: Any, key: Any, value: Any) -> Any:
        """Append a token, and attend."""
        ...


class Front(NamedTuple):
    """One library's arrays, what holds them, and whether that can be sequences too."""

    convert: Callable[[Array], Any]
    holders: dict[str, Callable[[], Held]]
    has_sequences: bool


HEADS, DIM, KEYS, STEPS = 8, 64, 100, 40
LENGTHS = (40, 100, 60, 80)
"""Tokens of the sequences."""
_WARM = 4
_TOLERANCE = {"int8": 0.1, "": 1e-5}
"""The largest error of outputs in float32, of inputs of unit variance; int8 keeps 8 bits of the
largest number in a row."""


def measured(name: str) -> dict[str, float]:
    """The microseconds of a step for each cache: the lower quartile of all steps."""
    convert, holders, has_sequences = FRONTS[name]()
    times: dict[str, float] = {}
    for cache, make in holders.items():
        times[cache] = _steps(make(), cache, convert)
        if has_sequences:
            times[f"{cache}, sequences"] = _steps(make(), cache, convert, LENGTHS)
    return times


def _steps(
    held: Held, name: str, convert: Callable[[Array], Any], lengths: Sequence[int] | None = None
) -> float:
    rng = np.random.default_rng(0)
    batch = 1 if lengths is None else len(lengths)
    counts = np.array([KEYS] if lengths is None else lengths)

    def drawn(tokens: int) -> Array:
        return rng.standard_normal((batch, HEADS, tokens, DIM), np.float32)

    keys, values = [drawn(KEYS)], [drawn(KEYS)]
    held.begin(convert(keys[0]), convert(values[0]), None if lengths is None else counts)
    times = []
    for n in range(_WARM + STEPS):
        query, key, value = (drawn(1) for _ in range(3))
        keys.append(key)
        values.append(value)
        tensors = convert(query), convert(key), convert(value)
        began = time.perf_counter()
        out = held.step(*tensors)
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


class _OfCache:
    """A cache of qkv."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._cache = make()

    def begin(self, key: Any, value: Any, lengths: Array | None) -> None:
        self._cache.append(key, value, lengths)

    def step(self, query: Any, key: Any, value: Any) -> Any:
        return self._cache.append(key, value).attention(query)


class _Joined:
    """Tensors that are joined, as without a cache."""

    def begin(self, key: Any, value: Any, lengths: Array | None) -> None:
        self._key, self._value = key, value

    def step(self, query: Any, key: Any, value: Any) -> Any:
        from torch import cat
        from torch.nn.functional import scaled_dot_product_attention

        self._key, self._value = cat([self._key, key], dim=2), cat([self._value, value], dim=2)
        return scaled_dot_product_attention(query, self._key, self._value)


def _caches() -> dict[str, Callable[[], Held]]:
    from qkv.cache import ContiguousCache, PagedCache, RollingCache

    kinds: dict[str, Callable[..., Any]] = {
        "contiguous": ContiguousCache,
        "paged": partial(PagedCache, page_size=16),
        "rolling": partial(RollingCache, 1024),
    }
    made: dict[str, Callable[[], Held]] = {}
    for name, kind in kinds.items():
        made[name] = partial(_OfCache, kind)
        made[f"{name} int8"] = partial(_OfCache, partial(kind, dtype="int8"))
    return made


def _tensor(array: Array) -> Any:
    import torch

    return torch.from_numpy(array)


FRONTS: dict[str, Callable[[], Front]] = {
    "qkv": lambda: Front(lambda array: array, _caches(), True),
    "qkv, tensors": lambda: Front(_tensor, _caches(), True),
    "torch.cat and sdpa": lambda: Front(_tensor, {"contiguous": _Joined}, False),
}


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1])))
