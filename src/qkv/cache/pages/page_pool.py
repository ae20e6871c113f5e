"""The storage of pages, shared by all caches that are forks of one another.

Forks may be used by different threads. Whoever takes, shares or releases pages, writes rows or lets
the storage grow has the lock of the pool, so that growing copies what was written, and nothing is
written to arrays that were replaced. Readers need no lock: the arrays and the table that they were
handed stay right for their pages, because nobody else writes to a page that they hold.

What the caches hold is kept once, in their `Holder`s, and changes in one step. The counts of the
allocator follow from it: after an exception in between, Ctrl-C among them, the next to come counts
anew.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from typing import Any, NamedTuple

import numpy as np

from qkv.cache.arguments import Lengths, longest, require_unchanged
from qkv.cache.encoding import Encoding
from qkv.cache.memory import Views, memory_with
from qkv.cache.new_tokens import Latest, NewTokens, RowFormat
from qkv.cache.pages.allocator import MOST_PAGES, PageAllocator
from qkv.errors import ShapeError, UnsupportedError
from qkv.problem.stored_rows import Paged
from qkv.process.forks import RenewedLock

__all__ = ["EMPTY", "Held", "Holder", "PagePool", "Storage"]

FIRST_PAGES = 16
"""Pages that a pool without a fixed number begins with."""


class Held(NamedTuple):
    """What a cache holds. Neither array is ever written to.

    Attributes
    ----------
    table : int64 array (batch, pages_per_slot)
        Numbers of pages; 0 behind the last of a sequence.
    lengths : int64 array (batch,)
        Tokens of each sequence; without a dimension while there are no sequences.
    """

    table: Lengths
    lengths: Lengths

    def pages(self, page_size: int) -> Lengths:
        """The numbers of all pages; one that sequences share is there for each."""
        if len(self.table) <= 1:
            return self.table.ravel()
        used = -(-self.lengths // page_size)
        return self.table[np.arange(self.table.shape[1]) < used[..., None]]

    @classmethod
    def of(cls, table: Lengths, lengths: Lengths, page_size: int) -> Held:
        """The first pages of each row of the table, as many as there are tokens for."""
        used = -(-lengths // page_size)
        most = longest(used)
        return cls(np.where(np.arange(most) < used[..., None], table[:, :most], 0), lengths)


EMPTY = Held(np.zeros((0, 0), np.int64), np.zeros((), np.int64))


class Holder(weakref.ref[Any]):
    """A cache, referred to weakly, and what it holds.

    The pool keeps the holder until the cache is collected and its pages are released.
    """

    held: Held


class Storage(NamedTuple):
    """Arrays `(num_pages, num_kv_heads, page_size, ...)` of the keys, then of the values.

    Attributes
    ----------
    arrays : tuple
    of_key : int
        How many of them belong to the keys.
    row_format : RowFormat or None
        What the rows have in common, its batch dimension apart; None while there are no sequences.
    key_offset : array or None
        What the encoding has taken from the keys.
    """

    arrays: tuple[Any, ...] = ()
    of_key: int = 0
    row_format: RowFormat | None = None
    key_offset: Any = None

    def without_pages(self) -> Storage:
        """Storage for rows of the same form, without a page."""
        if self.row_format is None:
            return self
        memory = memory_with(self.row_format.library)
        return self._replace(
            arrays=tuple([memory.empty((0, *array.shape[1:]), array) for array in self.arrays])
        )

    def paged(self, encoding: Encoding, table: Lengths) -> tuple[Paged, Paged]:
        """Key and value of sequences with these pages."""
        key = encoding.decode(self.arrays[: self.of_key], self.key_offset)
        value = encoding.decode(self.arrays[self.of_key :], None)
        return Paged(key, table), Paged(value, table)


class PagePool:
    """Pages, and who holds them.

    `lock` is for everybody who changes anything. Whoever has it calls `begin` or `begin_change`
    first.

    Attributes
    ----------
    page_size : int
    fixed : bool
        Whether `num_pages` was given, and no more are made.
    encoding : Encoding
    allocator : PageAllocator
    storage : Storage
    latest : Latest
    """

    def __init__(self, page_size: int, num_pages: int | None, encoding: Encoding) -> None:
        self.page_size = page_size
        self.fixed = num_pages is not None
        self.encoding = encoding
        self.storage = Storage()
        self._without_holders(0 if num_pages is None else num_pages)

    def _without_holders(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.latest, self._views = Latest(), Views()
        self._exclusive = RenewedLock()
        self._holders: dict[int, Holder] = {}
        # The interpreter appends to it when a cache is collected, wherever its thread is then.
        self._collected: deque[Holder] = deque()
        self._counts_are_right = True
        self._changed_inside = False

    def __getstate__(self) -> dict[str, Any]:
        """All but the holders: a cache that is unpickled with the pool is one of them again."""
        names = ("page_size", "fixed", "encoding", "storage")
        return {name: getattr(self, name) for name in names} | {"pages": self.allocator.num_pages}

    def __setstate__(self, state: dict[str, Any]) -> None:
        num_pages = state.pop("pages")
        self.__dict__.update(state)
        self._without_holders(num_pages)

    @property
    def lock(self) -> Any:
        """The lock of the pool.

        Raises
        ------
        UnsupportedError
            If this thread has it: a finalizer runs in the middle of another call.
        """
        if self._exclusive.is_mine():
            raise UnsupportedError(
                "a paged cache is forked or written to in the middle of a call of the same thread.",
                [("called from", "a finalizer or a signal handler")],
                "Only reset or truncate caches there.",
            )
        return self._exclusive.lock

    @property
    def nbytes(self) -> int:
        """Memory that the arrays take."""
        return sum(int(a.nbytes) for a in self.storage.arrays)

    def count(self) -> None:
        """Begin, if there is anything to be counted and this is possible now."""
        counted = self._counts_are_right and not self._collected and not self._changed_inside
        if not counted and not self._exclusive.is_mine():
            with self.lock:
                self.begin()

    def begin(self) -> None:
        """Count what exceptions have interrupted, and release what collected caches held."""
        if self._counts_are_right and not self._collected and not self._changed_inside:
            return
        if not self._counts_are_right or self._changed_inside:
            self._changed_inside, self._counts_are_right = False, False
            held: Counter[int] = Counter()
            for holder in list(self._holders.values()):
                held.update(holder.held.pages(self.page_size).tolist())
            self.allocator.recount(dict(held))
            self._counts_are_right = True
        while self._collected:
            holder = self._collected[0]
            self._counts_are_right = False
            if self._holders.pop(id(holder), None) is not None:
                self.allocator.release(holder.held.pages(self.page_size))
            self._collected.popleft()
            self._counts_are_right = True
        self.give_back()

    def begin_change(self, holder: Holder, before: Held) -> None:
        """Begin a change of a cache that holds `before`.

        Raises
        ------
        ArgumentError
            If it holds something else by now.
        """
        self.begin()
        require_unchanged(before, holder.held)

    def give_back(self) -> None:
        """Give the memory back if no page is held; sequences without tokens keep its form."""
        if self.allocator.num_free == self.allocator.num_pages:
            in_use = any(holder.held.lengths.ndim for holder in list(self._holders.values()))
            self.storage = self.storage.without_pages() if in_use else Storage()
            self._views = Views()
            if not self.fixed:
                self.allocator = PageAllocator(0)

    def holder_of(self, cache: Any) -> Holder:
        """A holder of nothing, for a new cache."""
        holder = Holder(cache, self._collected.append)
        holder.held = EMPTY
        self._holders[id(holder)] = holder
        return holder

    def counted_anew(self, holder: Holder, held: Held) -> None:
        """Let a holder hold what it held before it was pickled, or what it is left with.

        Needs no lock: the counts are made anew by whoever begins next.
        """
        holder.held = held
        self._changed_inside = True

    def change(
        self, holder: Holder, held: Held, more: Lengths | list[int], less: Lengths | list[int]
    ) -> None:
        """Let a holder hold `held`: `more` is held once more for it, and `less` once less."""
        self._counts_are_right = False
        if len(more):
            self.allocator.share(more)
        holder.held = held
        if len(less):
            self.allocator.release(less)
        self._counts_are_right = True

    def shrink(self, holder: Holder, before: Held, after: Held, less: Lengths) -> None:
        """Let a holder of `before` hold less; in the middle of another call too."""
        if self._exclusive.is_mine():
            self.counted_anew(holder, after)
            return
        with self.lock:
            self.begin_change(holder, before)
            self.change(holder, after, [], less)
            self.give_back()

    def take(self, count: int, new_tokens: NewTokens) -> list[int]:
        """Take pages for rows like those that arrive, making more where that is allowed.

        They are held by nobody until `change`.
        """
        total = self.allocator.num_pages
        missing = count - self.allocator.num_free
        if missing > 0 and not self.fixed:
            needed = total + missing
            if needed > MOST_PAGES:
                raise ShapeError(
                    f"{needed} pages of page_size={self.page_size} are needed; a cache has at "
                    f"most {MOST_PAGES}.",
                    action="Make the cache with a larger page_size, or free sequences that have "
                    "ended.",
                )
            total = max(needed, min(max(2 * total, FIRST_PAGES), MOST_PAGES))
        if missing <= 0 or not self.fixed:
            self._counts_are_right = False
            self._make_room(total, new_tokens)
            if total > self.allocator.num_pages:
                self.allocator.grow(total)
        return self.allocator.take(count) if count else []

    def _make_room(self, total: int, new_tokens: NewTokens) -> None:
        old, memory = self.storage.arrays, memory_with(new_tokens.row_format.library)
        if old and len(old[0]) >= total:
            return
        grown = []
        for i, new in enumerate(new_tokens.arrays):
            grown.append(memory.empty((total, new.shape[1], self.page_size, *new.shape[3:]), new))
            if old:
                grown[-1][: len(old[i])] = old[i]
        self.storage = Storage(
            tuple(grown), new_tokens.of_key, new_tokens.row_format, new_tokens.key_offset
        )

    def copy_page(self, source: int, target: int) -> None:
        """Write one page over another."""
        for array in self.storage.arrays:
            array[target] = array[source]

    def write(self, new_tokens: NewTokens, entries: list[tuple[Any, ...]]) -> None:
        """New rows into pages.

        An entry `(page, row, sequence, token)` of numbers, or of arrays of them, names a row of a
        page, and the new row that goes there.
        """
        stored = memory_with(new_tokens.row_format.library).written(
            self.storage.arrays, self._views
        )
        for target, source in zip(stored, new_tokens.arrays, strict=True):
            for page, row, sequence, token in entries:
                target[page, :, row] = source[sequence, :, token]
