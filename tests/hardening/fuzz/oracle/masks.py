"""Sizes, positions, rotation and masks of a problem, from their definitions.

Like `attention`, after docs/semantics.md and the papers, without the library. All arrays of scores
are `(draws, *batch_shape, num_heads, q_len, kv_len)`, or broadcast to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem, Variant  # noqa: TID252 - it has two names
from .published import philox

Array = NDArray[Any]


@dataclass(eq=False)
class Masks:
    """Where the rows of a problem stand, rotated by that, and which pairs its masks allow.

    `draw` says that the problem is this draw of a larger one: cotangents are those of all draws.
    """

    problem: Problem
    draw: int | None = None
    variants: tuple[Variant, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.variants = self.problem.variants
        self.query, self.key, self.value = self._operands()
        self.query, self.key = self._rotated(self.query, 1), self._rotated(self.key, -1)

    # Sizes

    def _operands(self) -> tuple[Array, Array, Array]:
        """(draws or 1, *batch, heads, length, dim), kv heads repeated for their group."""
        p = self.problem
        arrays = [np.asarray(a, np.float64) for a in (p.query, p.key, p.value)]
        if p.layout == "blhd":
            arrays = [a.swapaxes(-3, -2) for a in arrays]
        self.batch_shape = np.broadcast_shapes(*(a.shape[1:-3] for a in arrays))
        axes = len(self.batch_shape)
        query, key, value = (
            a.reshape(len(a), *(1,) * (axes + 4 - a.ndim), *a.shape[1:]) for a in arrays
        )
        self.shapes = query.shape, key.shape, value.shape
        self.num_heads, self.q_len, self.head_dim = query.shape[-3:]
        self.group_size = self.num_heads // max(key.shape[-3], 1)
        self.kv_len = key.shape[-2]
        self.scale = self.head_dim**-0.5 if p.scale is None else p.scale
        key, value = (np.repeat(a, self.group_size, axis=-3) for a in (key, value))
        return query, key, value

    def own(self, of_all_draws: Array) -> Array:
        """What belongs to this problem's draws."""
        return of_all_draws if self.draw is None else of_all_draws[self.draw : self.draw + 1]

    def all_named(self, name: str, only_conjunctions: bool = False) -> Iterator[Variant]:
        """Variants of a name, also inside of joined masks."""

        def within(variants: tuple[Variant, ...]) -> Iterator[Variant]:
            for v in variants:
                if v.name == name:
                    yield v
                if only_conjunctions and v.name in ("AnyOf", "Not"):
                    continue
                yield from within(v.fields.get("masks", ()))
                yield from within((v.fields["mask"],) if v.name == "Not" else ())

        return within(self.variants)

    def over_batch(self, variant: Variant | None, array: Any, trailing: int = 0) -> Array:
        """(draws or 1, *batch or 1s, 1, ...) from an array over the leading dimensions."""
        array = np.asarray(array)
        array = array if variant is not None and variant.varies else array[None]
        lead = array.ndim - 1 - trailing
        ones = (1,) * (len(self.batch_shape) - lead)
        ends = array.shape[array.ndim - trailing :]
        return array.reshape(array.shape[0], *ones, *array.shape[1 : 1 + lead], 1, *ends)

    def over_scores(self, variant: Variant, array: Any) -> Array:
        """(draws or 1, *batch or 1s, ...) from an array that broadcasts to scores."""
        array = np.asarray(array)
        array = array if variant.varies else array[None]
        return array.reshape(
            len(array), *(1,) * (len(self.batch_shape) + 4 - array.ndim), *array.shape[1:]
        )

    # Positions

    @cached_property
    def kv_count(self) -> Array:
        """The number of keys of each draw."""
        lens = np.array(self.problem.kv_lens or [self.kv_len])
        return lens.reshape(-1, *(1,) * (len(self.batch_shape) + 1))

    @cached_property
    def positions(self) -> tuple[Array, Array]:
        """(draws or 1, *batch or 1s, 1, length, 1) of queries, (..., 1, 1, length) of keys."""
        at = self.problem.q_offset
        at_end = isinstance(at, str) and at == "end"
        rows, keys = np.arange(self.q_len), np.arange(self.kv_len)
        if isinstance(at, str) or at is None:
            start = np.zeros_like(self.kv_count)
            if at_end:
                limits = self.all_named("KeyLengths", only_conjunctions=True)
                lens = [self.over_batch(v, v.fields["kv_lens"]) for v in limits]
                start = reduce(np.minimum, lens, self.kv_count) - self.q_len
        else:
            start = self.over_batch(None, at)
        first = self.over_batch(None, self.problem.kv_offset)
        for segments in self.all_named("Segments"):
            q_ids, kv_ids = self._segment_ids(segments)
            same_q, same_kv = (
                q_ids[..., :, None] == q_ids[..., None, :],
                kv_ids[..., :, None] == kv_ids[..., None, :],
            )
            rows = np.sum(same_q & np.tri(self.q_len, k=-1, dtype=bool), axis=-1)
            keys = np.sum(same_kv & np.tri(self.kv_len, k=-1, dtype=bool), axis=-1)
            if at_end:
                own = np.sum(q_ids[..., :, None] == kv_ids[..., None, :], axis=-1)
                rows, start = rows + own - np.sum(same_q, axis=-1), np.zeros_like(start)
        return (start[..., None] + rows)[..., None], (first[..., None] + keys)[..., None, :]

    @property
    def distance(self) -> Array:
        """`q_pos - kv_pos`."""
        q_pos, kv_pos = self.positions
        return q_pos - kv_pos

    def _segment_ids(self, segments: Variant) -> tuple[Array, Array]:
        q_ids, kv_ids = (
            self.over_batch(segments, segments.fields[n], 1) for n in ("q_ids", "kv_ids")
        )
        return q_ids, kv_ids

    # Rotation

    def _rotated(self, rows: Array, direction: int, back: bool = False) -> Array:
        """Rows of query (1) or key (-1) turned by their positions, or turned back."""
        for rope in self.all_named("RoPE"):
            f = rope.fields
            pairs = f["rotary_dim"] // 2
            frequency = f["inv_freq"]
            if frequency is None:
                frequency = 10000.0 ** (-np.arange(pairs) / max(pairs, 1))
            q_pos, kv_pos = self.positions
            position = q_pos if direction == 1 else kv_pos.swapaxes(-1, -2)
            angle = position * frequency
            cos, sin = f["attention_factor"] * np.cos(angle), f["attention_factor"] * np.sin(angle)
            sin = -sin if back else sin
            if f["layout"] == "half_split":
                first, second = slice(0, pairs), slice(pairs, 2 * pairs)
            else:
                first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
            shape = np.broadcast_shapes(rows.shape[:-1], angle.shape[:-1])
            turned = np.broadcast_to(rows, (*shape, rows.shape[-1])).copy()
            a, b = rows[..., first], rows[..., second]
            turned[..., first], turned[..., second] = a * cos - b * sin, a * sin + b * cos
            rows = turned
        return rows

    def turned_back(self, rows: Array, direction: int) -> Array:
        """Gradients of rotated rows as gradients of the rows themselves."""
        return self._rotated(rows, direction, back=True)

    def turned(self, rows: Array, direction: int) -> Array:
        """Tangents of rows as tangents of rotated rows."""
        return self._rotated(rows, direction)

    # Masks

    def mask(self, v: Variant) -> Array:
        """Where a mask allows; True for what is not a mask."""
        f = v.fields
        q_pos, kv_pos = self.positions
        rows, keys = np.arange(self.q_len), np.arange(self.kv_len)
        if v.name == "Causal":
            return np.asarray(kv_pos <= q_pos)
        if v.name == "SlidingWindow":
            after = f["left"] is None or kv_pos >= q_pos - f["left"]
            return np.asarray(after & (f["right"] is None or kv_pos <= q_pos + f["right"]))
        if v.name == "KeyLengths":
            return np.asarray(keys < self.over_batch(v, f["kv_lens"])[..., None, None])
        if v.name == "Prefix":
            return np.asarray(kv_pos < self.over_batch(v, f["length"])[..., None, None])
        if v.name == "GlobalTokens":
            return np.isin(q_pos, f["positions"]) | np.isin(kv_pos, f["positions"])
        if v.name == "Strided":
            return np.asarray((q_pos - kv_pos) % f["stride"] == 0)
        if v.name == "BlockSparse":
            blocks = self.over_scores(v, f["mask"])
            return blocks[..., (rows // f["block_q"])[:, None], keys // f["block_kv"]]
        if v.name == "RandomBlocks":
            return self._random_blocks(v)
        if v.name == "AnyOf":
            return reduce(np.logical_or, map(self.mask, f["masks"]))
        if v.name == "AllOf":
            return reduce(np.logical_and, map(self.mask, f["masks"]))
        if v.name == "Not":
            return ~self.mask(f["mask"])
        if v.name == "Segments":
            q_ids, kv_ids = self._segment_ids(v)
            return np.asarray(q_ids[..., :, None] == kv_ids[..., None, :])
        if "array" in f:
            given = self.over_scores(v, f["array"])
            return given if given.dtype == bool else ~np.isneginf(given.astype(float))
        return np.ones((), bool)

    def _random_blocks(self, v: Variant) -> Array:
        """Floyd's algorithm, for each head and block of queries."""
        size, r, seed = (v.fields[n] for n in ("block_size", "num_random_blocks", "seed"))
        count = -(-self.kv_len // size)
        drawn = np.zeros((self.num_heads, count + 2, count + 2), bool)
        for head in range(self.num_heads):
            for a in range(count):
                m = a if v.fields["causal"] else count
                chosen: set[int] = set()
                for i in range(min(r, m)):
                    j = m - min(r, m) + i
                    t = int(philox((i, a, head, 0), seed)) * (j + 1) >> 32
                    chosen.add(j if t in chosen else t)
                drawn[head, a, sorted(chosen)] = True
        q_block, kv_block = (np.asarray(p) // size for p in self.positions)
        # Blocks outside of 0 ... count - 1 are drawn by none.
        q_block, kv_block = (
            np.where((b < 0) | (b >= count), count, b) for b in (q_block, kv_block)
        )
        return drawn[np.arange(self.num_heads)[:, None, None], q_block, kv_block]

    @cached_property
    def masked(self) -> Array:
        """Where all masks allow, before score mods forbid anything."""
        exists = np.arange(self.kv_len) < self.kv_count[..., None, None]
        return reduce(np.logical_and, map(self.mask, self.variants), exists)
