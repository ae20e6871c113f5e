"""The page allocator: a free list, and a reference count for each page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from qkv.cache.arguments import checked_integer
from qkv.declarations import shown
from qkv.errors import ArgumentError, ShapeError

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
    use one alone. Each method does all of what it says, or raises and changes nothing. Time is
    proportional to the pages named. Source: Kwon et al., "PagedAttention" (2023), section 4.

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
        count = checked_integer(0, "num_pages", num_pages, MOST_PAGES)
        self._references = [0] * count
        self._free = list(range(count))[::-1]

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Free pages."""
        return len(self._free)

    def references(self, page: int) -> int:
        """How many times a page is held, 0 if it is free.

        Raises
        ------
        ArgumentError
            If there is no such page.
        """
        self._check([page])
        return self._references[page]

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
        if checked_integer(0, "count", count) > self.num_free:
            raise ShapeError(
                f"{count} pages are needed and {self.num_free} of {self.num_pages} are free.",
                action="Make the cache with more pages, or free sequences that have ended.",
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
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
        named = self._check(pages)
        for page, times in named.items():
            if not self._references[page]:
                raise ArgumentError(
                    f"page {page} is free, so nothing in it can be shared.",
                    [("held", f"0 times; to be held {times} times more")],
                    "Share pages of a sequence that is still there.",
                )
        for page, times in named.items():
            self._references[page] += times

    def release(self, pages: Iterable[int]) -> None:
        """Hold pages once less; those that are held no more are free.

        Parameters
        ----------
        pages : iterable of int
            A page named twice is released twice.

        Raises
        ------
        ArgumentError
            If there is no such page, or it is released more often than it is held.
        """
        named = self._check(pages)
        for page, times in named.items():
            if times > self._references[page]:
                raise ArgumentError(
                    f"page {page} is freed {times} times and held {self._references[page]} times.",
                    action="Release each page once for each take or share.",
                )
        for page, times in named.items():
            self._references[page] -= times
            if not self._references[page]:
                self._free.append(page)

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
        first = self.num_pages
        checked_integer(first, "num_pages", num_pages, MOST_PAGES)
        self._references += [0] * (num_pages - first)
        self._free[:0] = range(num_pages - 1, first - 1, -1)

    def _check(self, pages: Iterable[Any]) -> Counter[int]:
        """How often each page is named, if there are such pages."""
        try:
            pages = list(pages)
        except (TypeError, RuntimeError) as error:
            raise ArgumentError(
                f"pages={shown(pages)} are no numbers.", action="Pass a list of pages."
            ) from error
        for page in pages:
            whole = isinstance(page, int | np.integer) and not isinstance(page, bool)
            if not whole or not 0 <= page < self.num_pages:
                raise ArgumentError(
                    f"there is no page {shown(page)}; there are {self.num_pages} pages.",
                    action="Pass numbers of pages, from 0.",
                )
        return Counter(pages)
