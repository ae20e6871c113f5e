"""Classify tiles of the score matrix as empty, full or partial, without building it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.language.bounds import bound
from qkv.problem.language.expressions import FALSE, TRUE, Load, Node, walk
from qkv.problem.language.intervals import Interval

Array = NDArray[Any]


class TileKind(IntEnum):
    """EMPTY tiles are skipped, FULL ones need no mask, PARTIAL ones evaluate it."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class TileCounts:
    """How many tiles of each kind a schedule holds."""

    empty: int
    partial: int
    full: int

    @property
    def total(self) -> int:
        return self.empty + self.partial + self.full


@dataclass(frozen=True, slots=True)
class TileRun:
    """Neighbouring key tiles of one kind: keys `start` to `stop` for one block of queries."""

    start: int
    stop: int
    kind: TileKind


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The tiles of one problem; `classify` and `runs` take one batch row and head."""

    mask: Node
    tables: Mapping[str, Array]
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_len // self.block_kv)

    @property
    def depends_on(self) -> frozenset[str]:
        """The variables, among batch and head, on which the mask depends."""
        return self.mask.variables & {"batch", "head"}

    @property
    def is_local(self) -> bool:
        """Whether a tile has one kind, whatever tiles are classified with it, and at little cost.

        A table that is read by query and key may be bounded as a whole, and takes as long.
        """
        loads = (node for node in walk(self.mask) if isinstance(node, Load))
        return all(
            sum(len(index.variables & {"q_index", "kv_index"}) for index in load.indices) <= 1
            for load in loads
        )

    def classify(
        self,
        batch: int,
        head: int,
        first: int = 0,
        last: int | None = None,
        first_kv: int = 0,
        last_kv: int | None = None,
    ) -> Array:
        """`TileKind` of query blocks [first, last) and key blocks [first_kv, last_kv), as uint8."""
        last = self.q_blocks if last is None else last
        last_kv = self.kv_blocks if last_kv is None else last_kv
        shape = (last - first, last_kv - first_kv)
        if self.mask == TRUE or self.mask == FALSE or 0 in shape:
            kind = TileKind.FULL if self.mask == TRUE else TileKind.EMPTY
            return np.full(shape, kind, np.uint8)
        q_start = np.arange(first, last, dtype=np.int64)[:, None] * self.block_q
        kv_start = np.arange(first_kv, last_kv, dtype=np.int64)[None, :] * self.block_kv
        allowed = bound(
            self.mask,
            {
                "q_index": Interval(q_start, np.minimum(q_start + self.block_q, self.q_len) - 1),
                "kv_index": Interval(
                    kv_start, np.minimum(kv_start + self.block_kv, self.kv_len) - 1
                ),
                "batch": Interval.of(batch, batch),
                "head": Interval.of(head, head),
            },
            self.tables,
        )
        kinds = np.where(
            allowed.low >= 1,
            TileKind.FULL,
            np.where(allowed.high <= 0, TileKind.EMPTY, TileKind.PARTIAL),
        )
        return np.broadcast_to(kinds, shape).astype(np.uint8)

    def query_blocks(self, batch: int, head: int) -> Iterator[tuple[int, Array]]:
        """Each query block with the kinds of its tiles, computed a bounded number at a time."""
        step = max(1, 2**20 // max(self.kv_blocks, 1))
        for first in range(0, self.q_blocks, step):
            last = min(first + step, self.q_blocks)
            kinds = self.classify(batch, head, first, last)
            for i in range(first, last):
                yield i, kinds[i - first]

    def runs(self, kinds: Array) -> list[TileRun]:
        """The tiles of one query block as runs of keys, in order, empty ones left out."""
        if not len(kinds):
            return []
        edges = np.flatnonzero(np.diff(kinds)) + 1
        starts = [0, *edges.tolist()]
        stops = [*edges.tolist(), len(kinds)]
        return [
            TileRun(a * self.block_kv, min(b * self.block_kv, self.kv_len), TileKind(int(kinds[a])))
            for a, b in zip(starts, stops, strict=True)
            if kinds[a] != TileKind.EMPTY
        ]

    def blocks_of(
        self, pairs: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[slice, list[tuple[slice, TileKind]]]]:
        """The `blocks` of several pairs of batch index and head together.

        A tile is left out if it is empty for all of them, and full if it is for all of them.
        """
        own = sorted(self.depends_on)
        seen = {tuple({"batch": b, "head": h}[name] for name in own): (b, h) for b, h in pairs}
        for of_pairs in zip(*(self.query_blocks(*pair) for pair in seen.values()), strict=True):
            i, kinds = of_pairs[0][0], np.stack([kinds for _, kinds in of_pairs])
            same = (kinds == kinds[0]).all(axis=0)
            yield self._block(i, np.where(same, kinds[0], np.uint8(TileKind.PARTIAL)))

    def blocks(self, batch: int, head: int) -> Iterator[tuple[slice, list[tuple[slice, TileKind]]]]:
        """Rows of each query block, with rows and kind of the key blocks that are not empty."""
        for i, kinds in self.query_blocks(batch, head):
            yield self._block(i, kinds)

    def _block(self, i: int, kinds: Array) -> tuple[slice, list[tuple[slice, TileKind]]]:
        tiles = [
            (slice(start, min(start + self.block_kv, run.stop)), run.kind)
            for run in self.runs(kinds)
            for start in range(run.start, run.stop, self.block_kv)
        ]
        return slice(i * self.block_q, min((i + 1) * self.block_q, self.q_len)), tiles
