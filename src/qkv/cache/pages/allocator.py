"""The page allocator: a free list, and a reference count for each page."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from qkv.arguments.declarations import checked_size, is_integer, shown
from qkv.cache.arguments import Lengths
from qkv.errors import ArgumentError, ShapeError, UnsupportedError
from qkv.process.forks import RenewedLock

__all__ = ["PageAllocator"]


MOST_PAGES = 2**24
"""Pages that an allocator counts at most; each takes some 50 bytes here, beside its rows."""


class PageAllocator:
    """Numbers of pages with reference counts and a free list.

    Parameters
    ----------
    num_pages : int
        Pages 0 to `num_pages - 1`, all free at first.

    Raises
    ------
    ArgumentError
        If num_pages is not a whole number of 0 or more.

    Notes
    -----
    Holds no keys and values: `PagedCache` has an allocator beside its storage, and a scheduler may
    use one alone. Each method does all of what it says, or raises and changes nothing, whichever
    threads call it. Time is proportional to the pages named. Source: Kwon et al., "PagedAttention"
    (2023), section 4.

    Examples
    --------
    >>> from qkv.cache import PageAllocator
    >>> allocator = PageAllocator(4)
    >>> pages = allocator.take(3)
    >>> allocator.share(pages[:1])  # a second sequence begins with the first page
    >>> allocator.release(pages)
    >>> pages, allocator.num_free, allocator.references(0)
    ([0, 1, 2], 3, 1)
    """

    def __init__(self, num_pages: int) -> None:
        count = checked_size("num_pages", num_pages, 0, MOST_PAGES)
        self._num_pages = count
        # The counts decide: they change in one step of the interpreter, and the free list follows
        # from them. It is None while both change, and is made anew if an exception interrupts that.
        self._held: dict[int, int] = {}
        self._free: list[int] | None = list(range(count))[::-1]
        self._late: deque[list[Any]] = deque()
        self._exclusive = RenewedLock()

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Free pages."""
        self._settle()
        free = self._free
        return len(self._all_free()) if free is None else len(free)

    def references(self, page: int) -> int:
        """How many times a page is held, 0 if it is free.

        Raises
        ------
        ArgumentError
            If there is no such page.
        """
        self._settle()
        self._named([page])
        return self._times_held(page)

    def _times_held(self, page: int) -> int:
        """The same for a page that is there."""
        return self._held.get(page, 0)

    def take(self, count: int) -> list[int]:
        """Take free pages, each to be held once.

        Parameters
        ----------
        count : int

        Returns
        -------
        list of int

        Raises
        ------
        ShapeError
            If there are not as many.
        """
        count = checked_size("count", count, 0)
        self._refuse_inside_another_call()
        with self._exclusive.lock:
            free = self._begin()
            if count > len(free):
                raise ShapeError(
                    f"{count} pages are needed and {len(free)} of {self.num_pages} are free.",
                    action="Make the cache with more pages, or free sequences that have ended.",
                )
            pages = free[len(free) - count :][::-1]
            self._free = None
            self._held.update(dict.fromkeys(pages, 1))
            del free[len(free) - count :]
            self._free = free
        return pages

    def share(self, pages: Iterable[int] | Lengths) -> None:
        """Hold pages once more.

        Parameters
        ----------
        pages : iterable of int
            Pages that are held already.

        Raises
        ------
        ArgumentError
            If there is no such page, or it is free.
        """
        pages = _as_sequence(pages)
        self._refuse_inside_another_call()
        with self._exclusive.lock:
            self._begin()
            named = self._named(pages)
            for page in named:
                if not self._times_held(page):
                    raise ArgumentError(
                        f"page {page} is free, so nothing in it can be shared.",
                        [("held", f"0 times; to be held {named[page]} times more")],
                        "Share pages of a sequence that is still there.",
                    )
            self._held.update({page: self._held[page] + times for page, times in named.items()})

    def release(self, pages: Iterable[int] | Lengths) -> None:
        """Hold pages once less; those that are held no more are free.

        A finalizer may call it that runs in the middle of another method: the pages are released
        before anything is asked of the allocator after that.

        Parameters
        ----------
        pages : iterable of int
            A page named twice is released twice.

        Raises
        ------
        ArgumentError
            If there is no such page, or it is released more often than it is held.
        """
        pages = _as_sequence(pages)
        if self._exclusive.is_mine():
            self._late.append(list(pages))
            return
        with self._exclusive.lock:
            self._release(self._begin(), pages)

    def grow(self, num_pages: int) -> None:
        """Have `num_pages` pages in all; new ones are free.

        Parameters
        ----------
        num_pages : int
            No fewer than there are.

        Raises
        ------
        ArgumentError
            If there would be fewer pages than there are.
        """
        self._refuse_inside_another_call()
        with self._exclusive.lock:
            free, first = self._begin(), self.num_pages
            num_pages = checked_size("num_pages", num_pages, first, MOST_PAGES)
            self._free = None
            self._num_pages = num_pages
            free[:0] = range(num_pages - 1, first - 1, -1)
            self._free = free

    def recount(self, held: dict[int, int]) -> None:
        """Hold each page as often as `held` says, whatever was held before."""
        with self._exclusive.lock:
            self._free = None
            self._held = held

    def _refuse_inside_another_call(self) -> None:
        if self._exclusive.is_mine():
            raise UnsupportedError(
                "pages are asked for in the middle of another call of the same thread.",
                [("called from", "a finalizer or a signal handler")],
                "Only release pages there.",
            )

    def _settle(self) -> None:
        """Release what finalizers have, unless one of them asks."""
        if self._late and not self._exclusive.is_mine():
            with self._exclusive.lock:
                self._begin()

    def _begin(self) -> list[int]:
        """The free list, with what finalizers have released; the lock is held."""
        free = self._free
        if free is None:
            free = self._free = self._all_free()
        while self._late:
            self._release(free, self._late.popleft())
        return free

    def _all_free(self) -> list[int]:
        held = self._held
        return [page for page in reversed(range(self._num_pages)) if not held.get(page)]

    def _release(self, free: list[int], pages: Sequence[int] | Lengths) -> None:
        named = self._named(pages)
        for page, times in named.items():
            if times > self._times_held(page):
                raise ArgumentError(
                    f"page {page} is freed {times} times and held {self._times_held(page)} times.",
                    action="Release each page once for each take or share.",
                )
        left = {page: self._held[page] - times for page, times in named.items()}
        self._free = None
        self._held.update(left)
        free += [page for page, times in left.items() if not times]
        self._free = free

    def _named(self, pages: Sequence[Any] | Lengths) -> Counter[int]:
        """How often each page is named, if there are such pages."""
        numbers = _page_numbers(pages)
        for page in numbers:
            if not self._is_page(page):
                raise ArgumentError(
                    f"there is no page {shown(page)}; there are {self.num_pages} pages.",
                    action="Pass numbers of pages, from 0.",
                )
        return Counter(numbers)

    def _is_page(self, page: Any) -> bool:
        return is_integer(page) and 0 <= page < self._num_pages


def _page_numbers(pages: Any) -> list[Any]:
    """The pages as a list of what can be counted."""
    try:
        numbers = pages.tolist() if isinstance(pages, np.ndarray) else list(pages)
        Counter(numbers)
    except (TypeError, RuntimeError) as error:
        raise ArgumentError(
            f"pages={shown(pages)} are not numbers.", action="Pass a list of pages."
        ) from error
    return numbers


def _as_sequence(pages: Iterable[int]) -> Sequence[int] | Lengths:
    return pages if isinstance(pages, Sequence | np.ndarray) else _page_numbers(pages)
