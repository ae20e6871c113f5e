"""The example that the classical teaching texts compute by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SharedExample", "shared_example"]


@dataclass(frozen=True, slots=True, eq=False)
class SharedExample:
    """Arrays (5, 4), float64, with their tokens."""

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    tokens: tuple[str, ...]


def shared_example() -> SharedExample:
    """Five tokens of four numbers each: small enough to check every step by hand.

    Examples
    --------
    >>> import qkv, qkv.samples
    >>> example = qkv.samples.shared_example()
    >>> trace = qkv.explain(example.q, example.k, example.v, tokens=example.tokens, q_index=0)
    >>> float(trace.heads[0].rows[0].softmax.weights[1].round(4))
    0.2976
    """
    file = resources.files("qkv.samples").joinpath("shared_example.json")
    data = json.loads(file.read_text(encoding="utf-8"))
    q, k, v = (np.array(data[name], np.float64) for name in ("query", "key", "value"))
    return SharedExample(q, k, v, tuple(data["tokens"]))
