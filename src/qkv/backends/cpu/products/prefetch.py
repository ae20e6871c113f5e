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
    """Rows to ask for: where they start, byte strides, and bytes of each."""

    start: Value
    row: Value
    size: Value


_WORDS = 1 + 2 * len(RowRange._fields)
"""Number of words of the state: how many rows are left, and two ranges of rows."""


class Prefetcher:
    """Two stretches of `count` rows, kept at a place in memory."""

    def __init__(self, e: Emitter, place: Value, count: int) -> None:
        self.e, self.place, self.count = e, place, count

    @classmethod
    def none(cls, e: Emitter, count: int) -> Prefetcher:
        """With a place of its own, and no rows."""
        found = cls(e, e.words(_WORDS), count)
        found._keep(e.index(0))
        return found

    def plan(self, stretches: Sequence[RowRange], exist: Value) -> None:
        """What to ask for from now on, if there are such rows."""
        e, b = self.e, self.e.builder
        self._keep(b.select(exist, e.index(2 * self.count), e.index(0)))
        words = [word for each in stretches for word in (b.ptrtoint(each[0], INT64), *each[1:])]
        for n, word in enumerate(words, start=1):
            e.store(word, e.at(self.place, WORD * n), WORD)

    def ask(self) -> None:
        """For the next row."""
        e, b = self.e, self.e.builder
        left, *words = (e.load(e.at(self.place, WORD * n), INT64, WORD) for n in range(_WORDS))
        half = len(words) // 2
        with b.if_then(e.below(0, left)):
            is_first = e.below(self.count, left)
            start, row, size = map(b.select, [is_first] * half, words[:half], words[half:])
            number = e.sub(b.select(is_first, *map(e.index, (2 * self.count, self.count))), left)
            here = e.at(e.pointer(start), e.mul(number, row))
            e.loop(
                0, size, CACHE_LINE, [],
                lambda offset, _: e.prefetch(e.at(here, offset), soon=False),
            )  # fmt: skip
            self._keep(e.sub(left, 1))

    def _keep(self, left: Value) -> None:
        self.e.store(left, self.place, WORD)
