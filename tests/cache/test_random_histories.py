"""Random histories of caches: what any step reads is what was appended and not forgotten.

Caches of one kind take turns, so that the steps of one run what was prepared for another.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.cache import ContiguousCache, PagedCache, RollingCache

HEADS, KV_HEADS, DIM = 4, 2, 16
WINDOW, FIRST = 9, 2

MAKE = {
    "contiguous": lambda **o: ContiguousCache(**o),
    "paged": lambda **o: PagedCache(4, **o),
    "rolling": lambda **o: RollingCache(WINDOW, **o),
    "sinks": lambda **o: RollingCache(WINDOW, FIRST, **o),
}
SLOPES = np.array([0.5, 0.2, 0.1, 0.01])
SINKS = np.array([0.5, -1.0, 2.0, 0.0])
VARIANTS: dict[str, tuple[Any, ...]] = {
    "causal": (qkv.Causal(),),
    "alibi": (qkv.Causal(), qkv.ALiBi(SLOPES)),
    "softcap": (qkv.Causal(), qkv.Softcap(2.0)),
    "sinks": (qkv.Causal(), qkv.Sinks(SINKS)),
    "prefix": (qkv.Causal() | qkv.Prefix(3), qkv.SlidingWindow(None, 0)),
}


@dataclass
class Held:
    """A cache, and the tokens of each of its sequences in plain arrays."""

    cache: Any
    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    def forked(self):
        return Held(self.cache.fork(), list(self.keys), list(self.values))


def expected(query, held, counts, kind, name):
    """Row by row in float64, of the real rows of each sequence; None where a row is padding."""
    outs = []
    for b, (keys, values) in enumerate(zip(held.keys, held.values, strict=True)):
        first = keys.shape[1] - counts[b]
        for i in range(counts[b]):
            position = first + i
            kv_pos = np.arange(keys.shape[1])
            back = position - kv_pos
            seen = back >= 0
            if kind in ("rolling", "sinks"):
                seen &= (back < WINDOW) | (kv_pos < (FIRST if kind == "sinks" else 0))
            out = np.empty((HEADS, DIM))
            for h in range(HEADS):
                scores = keys[h // 2] @ query[b, h, i].astype(np.float64) / math.sqrt(DIM)
                if name == "alibi":
                    scores = scores - SLOPES[h] * back
                elif name == "softcap":
                    scores = 2 * np.tanh(scores / 2)
                weights = np.where(seen, np.exp(scores), 0)
                total = weights.sum() + (np.exp(SINKS[h]) if name == "sinks" else 0)
                out[h] = weights @ values[h // 2] / total
            outs.append((b, i, out))
    return outs


@pytest.mark.sampled(
    ("kind", "dtype", "library", "seed"),
    [
        (kind, dtype, library, seed)
        for seed in range(10)
        for kind in MAKE
        for dtype in (None, "int8")
        for library in ("numpy", "torch")
    ],
    one_in=10,
)
def test_random_histories(kind, dtype, library, seed) -> None:
    rng = np.random.default_rng([seed, len(kind), dtype is None, library == "torch"])
    name = str(rng.choice(list(VARIANTS)))
    batch = int(rng.integers(1, 4))
    convert = torch.from_numpy if library == "torch" else np.asarray

    def drawn(heads, new):
        return rng.standard_normal((batch, heads, new, DIM)).astype(np.float32)

    def append(held, new):
        counts = rng.integers(0, new + 1, batch) if rng.random() < 0.3 else np.full(batch, new)
        key, value, query = drawn(KV_HEADS, new), drawn(KV_HEADS, new), drawn(HEADS, new)
        rows = held.cache.append(
            convert(key), convert(value), None if (counts == new).all() else counts
        )
        if not held.keys:
            held.keys = held.values = [np.zeros((KV_HEADS, 0, DIM))] * batch
        for name_, arrays in (("keys", key), ("values", value)):
            own = [
                np.concatenate([old, array[:, :count]], axis=1)
                for old, array, count in zip(getattr(held, name_), arrays, counts, strict=True)
            ]
            setattr(held, name_, own)
        out = np.asarray(rows.attention(convert(query), *VARIANTS[name]))
        # A row of int8 is off by half a step of 1/127 of its largest number, here of some 3.
        atol = 1e-5 if dtype is None else 0.12
        for b, i, wanted in expected(query, held, counts, kind, name):
            np.testing.assert_allclose(out[b, :, i], wanted, atol=atol)

    every = [Held(MAKE[kind](dtype=dtype)) for _ in range(2)]
    for held in every:
        append(held, int(rng.integers(1, 20)))
    for _ in range(25):
        held = every[int(rng.integers(len(every)))]
        what = rng.random()
        if what < 0.1 and len(every) < 4:
            every.append(held.forked())
        elif what < 0.2 and kind in ("contiguous", "paged"):
            lengths = np.array([int(rng.integers(keys.shape[1] + 1)) for keys in held.keys])
            held.cache.truncate(lengths)
            for arrays in (held.keys, held.values):
                arrays[:] = [a[:, :n] for a, n in zip(arrays, lengths, strict=True)]
        elif what < 0.3:
            indices = rng.integers(0, batch, batch)
            held.cache.reorder(indices)
            held.keys, held.values = (
                [arrays[i] for i in indices] for arrays in (held.keys, held.values)
            )
        else:
            append(held, int(rng.choice([1, 1, 1, 1, 2, 5])))
