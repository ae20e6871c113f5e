"""One random problem: its sizes, where its arrays lie and where its rows stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fuzz.memory import scattered
from fuzz.variants import (
    Make,
    forbidding,
    random_masks,
    random_others,
    random_scores,
)
from qkv.problem.builder import Shape
from qkv.testing.case import DTYPES, Case
from qkv.testing.tolerances import ORDERS, Bounds, bounds

Array = NDArray[Any]
Rng = np.random.Generator

__all__ = ["random_case"]

PAIRS = 12_000
"""Pairs of a query row and a key of one problem, all heads together, at most."""

_EDGES = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 66, 127, 128, 129)
"""Lengths and dimensions at which a kernel changes what it does, and their neighbours."""


def random_case(seed: int, structure: int, number: int) -> Case:
    """Problem `number` of a structure, `case = random_case(seed, structure, number)`.

    What a kernel is compiled for follows from the seed and `structure`: dtype, kinds of variants,
    which axes of a mask there are. Problems of one structure share a few kernels and differ in the
    rest: sizes from 0, dimensions from 1 to 300, strides of every kind, offsets, values.

    Parameters
    ----------
    seed, structure, number : int
        0 or more. Equal ones give equal problems, in any process.

    Returns
    -------
    Case
        For `check_case`; its name is the call that makes it.

    Examples
    --------
    >>> from qkv.testing import check_case
    >>> case = random_case(0, 3, 1)
    >>> case
    random_case(0, 3, 1)
    >>> check_case("blocked", case)
    True
    """
    return _structure(seed, structure).case(number)


@dataclass(frozen=True, eq=False, repr=False)
class RandomCase(Case):
    """A case whose query, key and value lie in memory each in its own way."""

    key_of_memory: tuple[int, ...] = ()
    orders = (1, ORDERS, 100)
    """Of thousands of problems, a few are lucky in twelve orders."""

    def __repr__(self) -> str:
        return self.name

    def _bounds(self, dtype: str, orders: int) -> Bounds:
        """Random mods pile up: their steps are rounded in the plain computation too."""
        return bounds(self.truth(dtype), dtype, orders, stepwise=True)

    def place(self, array: Array, role: str) -> Array:
        rng = np.random.default_rng((*self.key_of_memory, *role.encode()))
        return scattered(array, rng)


@dataclass(frozen=True, slots=True)
class Structure:
    """What problems have in common that share their kernels."""

    key: tuple[int, int]
    dtype: str
    wide_axes: tuple[bool, ...]
    many_heads: bool
    few_queries: bool
    q_offset: str
    kv_offset: str
    layout: Literal["bhld", "blhd"]
    variants: tuple[Make, ...]
    any_scores: bool
    """Whether scores may be large or tiny, and offsets far, which takes all keys away. The bound
    of float64 knows nothing of the rounding of large scores, and that of other types little of the
    rounding inside a score mod."""

    def case(self, number: int) -> Case:
        """A problem of this structure."""
        key = (*self.key, number)
        rng = np.random.default_rng(key)
        shape = self._shape(rng)
        query_batch, kv_batch = _shares(shape.batch_shape, rng)
        extremes, farthest = ((1.0, 1e-3, 3.0), 100) if self.any_scores else ((), 12)
        return RandomCase(
            name=f"random_case{key}",
            shape=shape,
            variants=self._variants,
            scale=_one_of(rng, (None, None, None, None, 0.0, 0.1, -0.1, *extremes)),
            q_offset=_offset(self.q_offset, shape, rng, farthest),
            kv_offset=_offset(self.kv_offset, shape, rng, farthest),
            layout=self.layout,
            query_batch=query_batch,
            kv_batch=kv_batch,
            magnitude=_one_of(rng, (1.0, 1.0, *extremes)),
            dtypes=(self.dtype,),
            key_of_memory=key,
        )

    def _variants(self, shape: Shape, rng: Rng) -> Sequence[Any]:
        return [make(shape, rng) for make in self.variants]

    def _shape(self, rng: Rng) -> Shape:
        """Sizes within `PAIRS`; an empty one now and then."""
        batch = tuple(int(rng.integers(2, 4)) if wide else 1 for wide in self.wide_axes)
        heads = (1, 1)
        if self.few_queries:
            heads = _one_of(rng, ((1, 2), (1, 5), (2, 2), (2, 4), (1, 8)))
        elif self.many_heads:
            heads = _one_of(rng, ((2, 1), (3, 1), (1, 2), (1, 3), (2, 2)))
        each = prod(batch) * prod(heads)
        if self.few_queries:
            q_len, kv_len = int(rng.integers(1, 9)), _size(rng, 3000)
            kv_len = min(kv_len, 3 * PAIRS // (each * q_len))
        else:
            q_len, kv_len = _size(rng, 300), _size(rng, 300)
            kv_len = q_len if rng.random() < 0.3 else kv_len
            if each * q_len * kv_len > PAIRS:
                q_len = min(q_len, int(rng.integers(5, 100)))
                kv_len = min(kv_len, PAIRS // (each * q_len))
        head_dim, v_head_dim = _size(rng, 300), _size(rng, 300)
        if rng.random() < 0.03:
            empty = rng.random(3) < 0.4
            q_len, kv_len, v_head_dim = np.where(empty, 0, (q_len, kv_len, v_head_dim)).tolist()
        return Shape(batch, prod(heads), heads[0], q_len, kv_len, head_dim, v_head_dim)


@lru_cache(maxsize=64)
def _structure(seed: int, structure: int) -> Structure:
    rng = np.random.default_rng((seed, structure))
    axes = int(_one_of(rng, (0, 1, 1, 1, 2, 3)))
    dtype = str(_one_of(rng, (*DTYPES, "float32", "bfloat16")))
    scores = random_scores(rng, axes)
    variants = [*random_masks(rng, axes), *scores, *random_others(rng, axes)]
    order = rng.permutation(len(variants))
    last = [forbidding(rng)] if rng.random() < 0.1 else []
    return Structure(
        key=(seed, structure),
        dtype=dtype,
        wide_axes=tuple((rng.random(axes) < 0.6).tolist()),
        many_heads=bool(rng.random() < 0.6),
        few_queries=bool(rng.random() < 0.3),
        q_offset=_one_of(rng, ("start", "end", "end", "one", "each")),
        kv_offset=_one_of(rng, ("zero", "zero", "zero", "one", "each")),
        layout=_one_of(rng, ("bhld", "bhld", "blhd")),
        variants=(*(variants[i] for i in order), *last),
        any_scores=not (scores or last or dtype == "float64"),
    )


def _one_of(rng: Rng, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _size(rng: Rng, most: int) -> int:
    """At an edge or anywhere, rather small than large."""
    if rng.random() < 0.5:
        return int(_one_of(rng, _EDGES))
    return 2 + int((most - 2) * rng.random() ** 3)


def _offset(kind: str, shape: Shape, rng: Rng, most: int) -> Any:
    if kind == "one":
        return int(rng.integers(-8, most))
    if kind == "each":
        return rng.integers(-8, most, shape.batch_shape)
    return 0 if kind == "zero" else kind


def _shares(batch: tuple[int, ...], rng: Rng) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Leading dimensions of query and of keys that broadcast to `batch`."""
    owners = rng.choice(["both", "both", "both", "query", "keys"], len(batch))
    sides = {
        side: tuple(n if own in ("both", side) else 1 for n, own in zip(batch, owners, strict=True))
        for side in ("query", "keys")
    }
    shorter = _one_of(rng, ("query", "keys"))
    sizes = sides[shorter]
    ones = next((i for i, n in enumerate(sizes) if n > 1), len(sizes))
    sides[shorter] = sizes[int(rng.integers(ones + 1)) :]
    return sides["query"], sides["keys"]
