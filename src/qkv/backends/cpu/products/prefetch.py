"""Rows of K and V that are prefetched before they are needed, a few at a time.

A core has room for about a dozen outstanding reads from memory. Prefetching all rows of a block at
once would make all other reads wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qkv.backends.cpu.emit.emitter import CACHE_LINE, INT64, Emitter, Value
from qkv.backends.cpu.emit.frame import WORD


class RowRange(NamedTuple):
    """Rows to prefetch: the first one, the byte stride of rows, and the bytes of each."""

    start: Value
    row: Value
    size: Value


_WORDS = 1 + 2 * len(RowRange._fields)
"""Number of words of the state: how many rows are left, and two ranges of rows."""


class Prefetcher:
    """Two ranges of `count` rows to prefetch; the state is at the address `place`."""

    def __init__(self, e: Emitter, place: Value, count: int) -> None:
        self.e, self.place, self.count = e, place, count

    @classmethod
    def idle(cls, e: Emitter, count: int) -> Prefetcher:
        """A prefetcher with memory of its own that has no rows to prefetch."""
        found = cls(e, e.stack_words(_WORDS), count)
        found._store_rows_left(e.index(0))
        return found

    def plan(self, ranges: Sequence[RowRange], exist: Value) -> None:
        """Set the two ranges that are prefetched from now on, if they `exist`."""
        e, b = self.e, self.e.builder
        self._store_rows_left(b.select(exist, e.index(2 * self.count), e.index(0)))
        words = [word for each in ranges for word in (b.ptrtoint(each[0], INT64), *each[1:])]
        for n, word in enumerate(words, start=1):
            e.store(word, e.at(self.place, WORD * n), WORD)

    def prefetch_row(self) -> None:
        """Prefetch the next row."""
        e, b = self.e, self.e.builder
        rows_left, *words = (e.load(e.at(self.place, WORD * n), INT64, WORD) for n in range(_WORDS))
        half = len(words) // 2
        with b.if_then(e.below(0, rows_left)):
            is_first = e.below(self.count, rows_left)
            start, row, size = map(b.select, [is_first] * half, words[:half], words[half:])
            number = e.sub(
                b.select(is_first, *map(e.index, (2 * self.count, self.count))), rows_left
            )
            here = e.at(e.pointer(start), e.mul(number, row))
            e.loop(
                0, size, CACHE_LINE, [],
                lambda offset, _: e.prefetch(e.at(here, offset), soon=False),
            )  # fmt: skip
            self._store_rows_left(e.sub(rows_left, 1))

    def _store_rows_left(self, rows_left: Value) -> None:
        self.e.store(rows_left, self.place, WORD)
