"""Structures of problems, and their layouts: sizes, where arrays lie and where rows stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ..problem import DTYPES, Problem, Variant  # noqa: TID252 - it has two names
from .memory import scattered
from .shape import Shape
from .variants import Make, random_variants

Rng = np.random.Generator

__all__ = ["random_problem"]

DRAWS: Mapping[str, int] = {
    "forward": 192, "decoding": 96, "gradients": 24, "tangents": 4, "inspection": 8, "torch": 16,
}  # fmt: skip
"""The draws of values for one layout, by purpose: the quicker they are, the more there are."""
_SHARES = ("forward",) * 7 + ("decoding",) * 3 + ("gradients",) * 4 + (
    "tangents", "inspection", "inspection", "torch", "torch",
)  # fmt: skip
_FEW_PAIRS, _PAIRS = 400, 12_000
"""Pairs of a query row and a key, all heads together: of nearly all problems, and of all."""

_EDGES = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 66, 127, 128, 129)
"""Lengths and dimensions at which a kernel changes what it does, and their neighbours."""


def random_problem(seed: int, structure: int, layout: int, draws: int | None = None) -> Problem:
    """Layout `layout` of a structure, with values for a number of draws.

    What a kernel is compiled for follows from the seed and `structure`: dtype, kinds of variants,
    which axes of a mask there are. Layouts of one structure share a few kernels and differ in the
    rest: sizes from 0, dimensions from 1 to 300, strides of every kind, offsets, values. `draws` is
    the number of draws, that of the purpose by default.

    Parameters
    ----------
    seed, structure, layout : int
        0 or more. Equal ones give equal problems, in any process.
    """
    return _structure(seed, structure).layout(layout, draws)


@dataclass(frozen=True, slots=True)
class Structure:
    """What problems have in common that share their kernels."""

    key: tuple[int, int]
    purpose: str
    dtype: str
    wide_axes: tuple[bool, ...]
    many_heads: bool
    few_queries: bool
    q_offset: str
    kv_offset: str
    blhd: bool
    variants: tuple[Make, ...]
    forced: Mapping[str, Any]

    def layout(self, number: int, draws: int | None) -> Problem:
        """A problem of this structure."""
        rng = np.random.default_rng((*self.key, number))
        shape = self._shape(rng, large=bool(rng.random() < 0.04))
        if draws is not None:
            shape = shape._replace(draws=draws)
        query_batch, kv_batch = _shares(shape.batch_shape, rng)
        lens: tuple[int, ...] = ()
        if self.purpose == "decoding":
            query_batch = kv_batch = shape.batch_shape
            least = min(shape.q_len + 1, shape.kv_len)
            grown = range(least, shape.kv_len + 1)
            lens = tuple(list(grown)[-shape.draws :])
            shape = shape._replace(draws=len(lens))
        variants = tuple(_grown(make(shape, rng), lens) for make in self.variants)
        # The bound of float64 knows nothing of the rounding of large scores, and that of other
        # types little of the rounding inside a score mod.
        any_scores = self.dtype != "float64" and not any(
            v.name in ("array", "Bias", "ALiBi", "RelativeBias", "Softcap", "ScoreMod")
            for v in variants
        )
        extremes, farthest = ((1.0, 1e-3, 3.0), 100) if any_scores else ((), 12)
        magnitude = _one_of(rng, (1.0, 1.0, *extremes))
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        keys = 1 if lens else shape.draws
        query, key, value = (
            self._placed(size * rng.normal(size=sizes), rng)
            for size, sizes in (
                (magnitude, (shape.draws, *query_batch, heads, shape.q_len, shape.head_dim)),
                (magnitude, (keys, *kv_batch, kv_heads, shape.kv_len, shape.head_dim)),
                (1.0, (keys, *kv_batch, kv_heads, shape.kv_len, shape.v_head_dim)),
            )
        )
        return Problem(
            self.purpose,
            self.dtype,
            query,
            key,
            value,
            variants,
            layout="blhd" if self.blhd else "bhld",
            scale=_one_of(rng, (None, None, None, None, 0.0, 0.1, -0.1, *extremes)),
            q_offset=_offset(self.q_offset, shape, rng, farthest),
            kv_offset=_offset(self.kv_offset, shape, rng, farthest),
            kv_lens=lens,
            forced=self.forced,
            poison=float(_one_of(rng, (0.0, np.nan, np.inf))),
            seed=int(rng.integers(2**31)),
        )

    def _placed(self, array: Any, rng: Rng) -> Any:
        array = array.astype(DTYPES[self.dtype])
        if self.blhd:
            array = array.swapaxes(-3, -2)
        return scattered(array, rng, draws=True, for_tensors=self.purpose == "torch")

    def _shape(self, rng: Rng, large: bool) -> Shape:
        """Sizes within a number of pairs; an empty one now and then."""
        pairs = _PAIRS if large else _FEW_PAIRS
        batch = tuple(int(rng.integers(2, 4)) if wide else 1 for wide in self.wide_axes)
        heads = (1, 1)
        if self.few_queries:
            heads = _one_of(rng, ((1, 2), (1, 5), (2, 2), (2, 4), (1, 8)))
        elif self.many_heads:
            heads = _one_of(rng, ((2, 1), (3, 1), (1, 2), (1, 3), (2, 2)))
        each = prod(batch) * prod(heads)
        most = 300 if large else 40
        if self.few_queries or self.purpose == "decoding":
            q_len, kv_len = int(rng.integers(1, 9)), _size(rng, 10 * most)
            kv_len = min(kv_len, 3 * pairs // (each * q_len))
        else:
            q_len, kv_len = _size(rng, most), _size(rng, most)
            kv_len = q_len if rng.random() < 0.3 else kv_len
            if each * q_len * kv_len > pairs:
                q_len = min(q_len, int(rng.integers(1, 2 + pairs // (8 * each))))
                kv_len = min(kv_len, max(1, pairs // (each * q_len)))
        if self.purpose == "decoding":
            kv_len = max(kv_len, q_len + 1)
        head_dim, v_head_dim = _size(rng, most), _size(rng, most)
        if rng.random() < 0.03 and self.purpose != "decoding":
            empty = rng.random(3) < 0.4
            q_len, kv_len, v_head_dim = np.where(empty, 0, (q_len, kv_len, v_head_dim)).tolist()
        draws = DRAWS[self.purpose]
        if large or (self.purpose == "gradients" and rng.random() < 0.1):
            draws = max(2, draws // 8)
        return Shape(batch, prod(heads), heads[0], q_len, kv_len, head_dim, v_head_dim, draws)


@lru_cache(maxsize=64)
def _structure(seed: int, structure: int) -> Structure:
    rng = np.random.default_rng((seed, structure))
    purpose = str(_one_of(rng, _SHARES))
    decoding = purpose == "decoding"
    axes = int(_one_of(rng, (0, 1, 1, 1, 2, 3)))
    return Structure(
        key=(seed, structure),
        purpose=purpose,
        dtype=str(_one_of(rng, (*DTYPES, "float32", "bfloat16"))),
        wide_axes=tuple((rng.random(axes) < 0.6).tolist()),
        many_heads=bool(rng.random() < 0.6),
        few_queries=bool(rng.random() < 0.3),
        q_offset=_one_of(rng, ("start", "end", "end", "one", "each")[: 4 if decoding else 5]),
        kv_offset=_one_of(rng, ("zero", "zero", "zero", "one", "each")),
        blhd=bool(rng.random() < 1 / 3),
        variants=tuple(random_variants(rng, axes, decoding)),
        forced={
            "isa": int(_one_of(rng, (0, 0, 0, 1, 2, 3))),
            "masks read": bool(rng.random() < 0.5),
            "parts": bool(rng.random() < 0.3),
        },
    )


def _grown(variant: Variant, kv_lens: tuple[int, ...]) -> Variant:
    """Numbers of keys in each step are no more than there are."""
    if variant.name != "KeyLengths" or not kv_lens:
        return variant
    lens = np.asarray(variant.fields["kv_lens"])
    each = np.minimum(lens, np.reshape(kv_lens, (-1,) + (1,) * lens.ndim))
    return Variant(variant.name, {"kv_lens": each}, True)


def _one_of(rng: Rng, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _size(rng: Rng, most: int) -> int:
    """A size at an edge or anywhere, rather small than large."""
    if rng.random() < 0.5:
        return min(int(_one_of(rng, _EDGES)), most)
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
