"""A map of the weights of one head at any length: tiles of a pyramid, computed when asked for.

Level 0 has one number for each pair, level L one for each block of 2^L x 2^L pairs: their largest
weight, and their mean. The whole matrix is never held. Tiles of the lower levels are computed when
they are asked for. A base level is computed once for the whole head, by one pass over all pairs,
and the levels above come from it.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Inspectable, WeightBlocks, choose
from qkv.errors import UnsupportedError
from qkv.inspection.weights.replay import Replay
from qkv.inspection.weights.weight_blocks import folded, pairs_of, reduced

__all__ = ["TILE", "WeightMaps", "levels_of"]

Array = NDArray[Any]

TILE = 256
"""The number of rows, and of columns, of a tile."""

FIRST_BASE, BASE = 5, 1 << 24
"""The base level is the first from 5 on that has no more numbers than this: at 131,072 tokens level
5, 4096 x 4096, which takes 128 MiB with both reductions. A tile below it reads 2^24 pairs."""

EXACT = 1 << 20
"""The most pairs, in whole rows, for which a tile of level 0 is computed in float64."""

MOST_BYTES = 512 << 20
"""The most bytes of tiles and levels that are kept; the oldest are dropped first."""


def levels_of(q_len: int, kv_len: int) -> int:
    """Levels of a map, the last of which is one tile.

    Examples
    --------
    >>> levels_of(256, 100), levels_of(257, 100), levels_of(131_072, 131_072)
    (1, 2, 10)
    """
    longest = max(q_len, kv_len, 1)
    return max(0, (-(-longest // TILE) - 1).bit_length()) + 1


class WeightMaps:
    """Tiles of the maps of many heads, with what has been computed kept within `MOST_BYTES`."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._blocks: dict[Replay, WeightBlocks | None] = {}
        self._kept: OrderedDict[Any, tuple[Array, Array]] = OrderedDict()
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept now."""
        return sum(a.nbytes + b.nbytes for a, b in self._kept.values())

    def tile(
        self, replay: Replay, head: int, level: int, row: int, column: int
    ) -> tuple[Array, Array]:
        """A tile of batch row 0.

        Parameters
        ----------
        replay : Replay
        head, level, row, column : int
            Which head, level of detail, and tile of that level.

        Returns
        -------
        largest, mean : float32 (rows, columns)
            Of the weights of each block of 2^level x 2^level pairs.
        """
        spec, block = replay.problem.spec, 1 << level
        q_first, kv_first = row * TILE * block, column * TILE * block
        q_stop = min(q_first + TILE * block, spec.q_len)
        kv_stop = min(kv_first + TILE * block, spec.kv_len)
        place = (replay, head, level, row, column)
        maps = self._get(place)
        if maps is None:
            if level < _base_level(spec.q_len, spec.kv_len):
                maps = self._reduced(replay, head, (q_first, q_stop), (kv_first, kv_stop), block)
                self._put(place, maps)
            else:
                rows, columns = (slice(i * TILE, (i + 1) * TILE) for i in (row, column))
                largest, mean = self._level(replay, head, level)
                maps = largest[rows, columns], mean[rows, columns]
        return maps

    def _level(self, replay: Replay, head: int, level: int) -> tuple[Array, Array]:
        """A whole level, from the one below it or, at the base, from all weights."""
        spec = replay.problem.spec
        place = (replay, head, level)
        maps = self._get(place)
        if maps is None:
            if level == _base_level(spec.q_len, spec.kv_len):
                whole = (0, spec.q_len), (0, spec.kv_len)
                maps = self._reduced(replay, head, *whole, 1 << level)
            else:
                maps = self._halved(replay, head, level)
            self._put(place, maps)
        return maps

    def _halved(self, replay: Replay, head: int, level: int) -> tuple[Array, Array]:
        """A level from the one below it; means are weighted by what their blocks hold."""
        spec, block = replay.problem.spec, 1 << (level - 1)
        largest, mean = self._level(replay, head, level - 1)
        pairs = pairs_of(spec.q_len, spec.kv_len, block)
        total = folded(mean * pairs, 2, np.add)
        held = pairs_of(spec.q_len, spec.kv_len, 2 * block)
        return folded(largest, 2, np.maximum), (total / held).astype(np.float32)

    def _reduced(
        self,
        replay: Replay,
        head: int,
        q_rows: tuple[int, int],
        kv_rows: tuple[int, int],
        block: int,
    ) -> tuple[Array, Array]:
        """Reduced blocks of weights, by compiled code if they are large enough, else by NumPy."""
        rows, columns = np.arange(*q_rows), np.arange(*kv_rows)
        if block == 1 and len(rows) * replay.problem.spec.kv_len <= EXACT:
            weights = replay.exact(0, head, rows, columns).astype(np.float32)
            return weights, weights
        blocks = self._blocks_of(replay) if block > 1 else None
        maps = None if blocks is None else blocks(0, head, slice(*q_rows), slice(*kv_rows), block)
        if maps is None:
            largest, mean = reduced(replay, head, q_rows, kv_rows, block)
        else:
            largest, sums = maps
            mean = sums / pairs_of(len(rows), len(columns), block)
        # lse is rounded: a weight of 1 may come out as 1.00001.
        return np.minimum(largest, 1).astype(np.float32), np.minimum(mean, 1).astype(np.float32)

    def _blocks_of(self, replay: Replay) -> WeightBlocks | None:
        """The reductions of the backend that would run the problem, if it has them."""
        if replay not in self._blocks:
            blocks = None
            try:
                backend = choose(replay.problem.spec).backend
            except UnsupportedError:
                backend = None
            if isinstance(backend, Inspectable):
                blocks = backend.weight_blocks(replay.problem, replay.lse)
            self._blocks[replay] = blocks
        return self._blocks[replay]

    def _get(self, place: Any) -> tuple[Array, Array] | None:
        with self._lock:
            if place not in self._kept:
                return None
            self._kept.move_to_end(place)
            return self._kept[place]

    def _put(self, place: Any, maps: tuple[Array, Array]) -> None:
        with self._lock:
            self._kept[place] = maps
            while len(self._kept) > 1 and self.nbytes > self._most_bytes:
                self._kept.popitem(last=False)


def _base_level(q_len: int, kv_len: int) -> int:
    level = FIRST_BASE
    while -(-q_len // (1 << level)) * -(-kv_len // (1 << level)) > BASE:
        level += 1
    return level
