"""The storage of pages, shared by all caches that are forks of one another."""

from __future__ import annotations

from typing import Any

from qkv.cache.allocator import PageAllocator
from qkv.cache.arguments import Lengths
from qkv.cache.encoding import Encoding
from qkv.cache.memory import memory_with
from qkv.cache.new_tokens import NewTokens, RowFormat
from qkv.problem.stored_rows import Paged

__all__ = ["PagePool"]

FIRST_PAGES = 16
"""Pages that a pool without a fixed number begins with."""


class PagePool:
    """Arrays `(num_pages, num_kv_heads, page_size, ...)` of keys and values, and who holds them.

    Attributes
    ----------
    page_size : int
    fixed : bool
        Whether `num_pages` was given, and no more are made.
    allocator : PageAllocator
    row_format : RowFormat or None
        What the rows have in common, its batch dimension apart; None while no page is held.
    """

    def __init__(self, page_size: int, num_pages: int | None, encoding: Encoding) -> None:
        self.page_size = page_size
        self.fixed = num_pages is not None
        self.encoding = encoding
        self.allocator = PageAllocator(num_pages or 0)
        self.row_format: RowFormat | None = None
        self._arrays: tuple[Any, ...] = ()
        self._of_key = 0

    @property
    def nbytes(self) -> int:
        """Memory that the arrays take."""
        return sum(int(a.nbytes) for a in self._arrays)

    def release(self, pages: list[int]) -> None:
        """Hold pages once less; when none is held, the memory is given back."""
        self.allocator.release(pages)
        if self.allocator.num_free == self.allocator.num_pages:
            self.row_format, self._arrays = None, ()
            if not self.fixed:
                self.allocator = PageAllocator(0)

    def take(self, count: int, new_tokens: NewTokens) -> list[int]:
        """Take pages for rows like those that arrive, making more where that is allowed."""
        missing = count - self.allocator.num_free
        if missing <= 0 or not self.fixed:
            if missing > 0:
                pages = self.allocator.num_pages
                self.allocator.grow(max(pages + missing, 2 * pages, FIRST_PAGES))
            self._make_room(new_tokens)
        return self.allocator.take(count)

    def _make_room(self, new_tokens: NewTokens) -> None:
        memory, total = memory_with(new_tokens.row_format.library), self.allocator.num_pages
        if not self._arrays or len(self._arrays[0]) < total:
            grown = []
            for i, new in enumerate(new_tokens.arrays):
                shape = (total, new.shape[1], self.page_size, *new.shape[3:])
                grown.append(memory.empty(shape, new))
                if self._arrays:
                    grown[-1][: len(self._arrays[i])] = self._arrays[i]
            self._arrays, self._of_key = tuple(grown), new_tokens.of_key
        self.row_format = new_tokens.row_format

    def copy_page(self, source: int, target: int) -> None:
        """Write one page over another."""
        for array in self._arrays:
            array[target] = array[source]

    def write(
        self, new_tokens: NewTokens, pages: Lengths, rows: Lengths, batch: Lengths, new: Lengths
    ) -> None:
        """New row `new[i]` of sequence `batch[i]` into row `rows[i]` of page `pages[i]`."""
        for stored, new_array in zip(self._arrays, new_tokens.arrays, strict=True):
            stored[pages, :, rows] = new_array[batch, :, new]

    def paged(self, table: Lengths) -> tuple[Paged, Paged]:
        """Key and value of sequences with these pages."""
        key = self.encoding.decode(self._arrays[: self._of_key], "key")
        value = self.encoding.decode(self._arrays[self._of_key :], "value")
        return Paged(key, table), Paged(value, table)
