"""A cache in pages that sequences share until one of them writes."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import numpy as np

import qkv
from qkv.cache.arguments import (
    Lengths,
    checked_integer,
    sequence_indices,
    shorter_lengths,
    whole_numbers,
)
from qkv.cache.encoding import encoding_of
from qkv.cache.new_tokens import NewTokens, check, encode
from qkv.cache.page_pool import PagePool
from qkv.cache.stored_rows import Part, Rows, as_offset
from qkv.errors import ArgumentError, ShapeError

__all__ = ["PagedCache"]


class PagedCache:
    """Keys and values in pages of `page_size` tokens, of which each sequence has a list.

    Row j of a sequence lies in row `j % page_size` of its page `j // page_size`. Forks, and
    sequences that `reorder` names twice, share pages, which are counted; whoever writes to a page
    that others hold as well, which only the last of a sequence can be, writes to a copy of it.
    Forks share the storage too: a prompt is computed once, forked for every request, and takes its
    memory once.

    Parameters
    ----------
    page_size : int
        Tokens in a page.
    num_pages : int, optional
        Pages in all, for this cache and its forks. Unless given, their number doubles whenever
        all are held.
    dtype : "int8", optional
        Keep rows as int8 with one scale for each token and kv head (`qkv.cache.quantize`, which
        states the error). Unless given, they stay in the dtype in which they come.

    Raises
    ------
    ArgumentError
        If a size is not a whole number of its range, or the dtype is unknown.

    Notes
    -----
    Keys and values have four dimensions, (batch, num_kv_heads, new, dim). `append` copies the new
    rows, and at most one page for each sequence. Memory for a token of one sequence:
    `num_kv_heads * (head_dim + v_head_dim) * itemsize` bytes, or
    `num_kv_heads * (head_dim + v_head_dim + 8)` as int8, and up to `page_size - 1` unused rows at
    its end; a shared page counts once. `fork`, `reorder` and `truncate` copy no rows. Source: Kwon
    et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
    (2023).

    Examples
    --------
    >>> import numpy as np, qkv, qkv.cache
    >>> cache = qkv.cache.PagedCache(page_size=4)
    >>> prompt = np.ones((1, 2, 10, 8), np.float32)  # batch, kv heads, tokens, head_dim
    >>> rows = cache.append(prompt, prompt)
    >>> cache.reorder([0, 0, 0])  # three beams, one prompt
    >>> cache.pages_held
    3
    >>> token = np.ones((3, 2, 1, 8), np.float32)
    >>> rows = cache.append(token, token)  # each beam writes to a page of its own
    >>> cache.pages_held, cache.lengths
    (5, array([11, 11, 11]))
    >>> rows.attention(np.ones((3, 4, 1, 8), np.float32), qkv.Causal()).shape
    (3, 4, 1, 8)
    """

    def __init__(
        self, page_size: int = 16, num_pages: int | None = None, *, dtype: str | None = None
    ) -> None:
        checked_integer(1, "page_size", page_size)
        if num_pages is not None:
            checked_integer(0, "num_pages", num_pages)
        self.dtype = dtype
        self._begin(PagePool(page_size, num_pages, encoding_of(dtype)))

    def _begin(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: list[list[int]] = []
        self._lengths: Lengths = np.zeros((), np.int64)
        # The finalizer reads this list, which is therefore only ever changed in place.
        weakref.finalize(self, _release_all, pool, self._pages).atexit = False

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._pool.page_size

    @property
    def lengths(self) -> Lengths:
        """Tokens that each sequence has seen, int64 (batch,)."""
        return self._lengths.copy()

    @property
    def q_offset(self) -> Any:
        """Position of the next token: an int, or an int64 array where sequences differ."""
        return as_offset(self.lengths)

    @property
    def page_table(self) -> Lengths:
        """Numbers of pages, int64 (batch, pages_per_slot); 0 behind the last of a sequence."""
        table = np.zeros((len(self._pages), max(map(len, self._pages), default=0)), np.int64)
        for row, pages in zip(table, self._pages, strict=True):
            row[: len(pages)] = pages
        return table

    @property
    def pages_held(self) -> int:
        """Different pages that the sequences of this cache hold."""
        return len({page for pages in self._pages for page in pages})

    @property
    def pages_free(self) -> int:
        """Pages of the storage that neither this cache nor a fork of it holds."""
        return self._pool.allocator.num_free

    @property
    def nbytes(self) -> int:
        """Memory that all pages take, those of forks and free ones included, in bytes."""
        return self._pool.nbytes

    def read(self) -> Rows:
        """The stored rows, for queries at `q_offset` and later.

        Raises
        ------
        ArgumentError
            If the cache is empty.
        """
        if self._pool.row_format is None or not self._lengths.ndim:
            raise ArgumentError("the cache is empty.", action="Append keys and values first.")
        return self._rows(self._lengths)

    def append(self, key: Any, value: Any, new_lens: Any = None) -> Rows:
        """Write new tokens and hand out all rows that they may attend to.

        Parameters, result and errors are those of `qkv.cache.Cache.append`; there is no room
        when `num_pages` was given and too few are free.
        """
        first = self._pool.row_format
        if first is not None:  # The pool is shared with forks, which may have another batch size.
            first = first.with_batch((*getattr(key, "shape", ()), 0)[0])
        row_format, counts = check(key, value, new_lens, first, batched=True)
        if self._lengths.ndim and counts.shape != self._lengths.shape:
            raise ShapeError(
                f"key and value have {len(counts)} sequences; the cache has {len(self._pages)}.",
                action="Append to all of its sequences, or reorder it first.",
            )
        new_tokens = encode(key, value, row_format, counts, self._pool.encoding)
        before = np.broadcast_to(self._lengths, counts.shape)
        pages = self._pages or [[] for _ in before]
        self._pages[:] = self._pages_for(pages, before, new_tokens)
        self._write(before, new_tokens)
        self._lengths = before + counts
        return self._rows(before)

    def truncate(self, lengths: Any) -> None:
        """Forget all tokens but the first `lengths` of each sequence, and release their pages.

        Parameters and errors are those of `qkv.cache.Cache.truncate`.
        """
        self._lengths = shorter_lengths(lengths, self._lengths)
        for pages, length in zip(self._pages, self._lengths.flat, strict=False):
            needed = -(-int(length) // self.page_size)
            self._pool.release(pages[needed:])
            del pages[needed:]

    def reorder(self, indices: Any) -> None:
        """Make sequence i of the batch what sequence `indices[i]` was; copies no rows.

        Parameters and errors are those of `qkv.cache.Cache.reorder`.
        """
        chosen = sequence_indices(indices, self._lengths.shape)
        after = [list(self._pages[i]) for i in chosen]
        before = [page for pages in self._pages for page in pages]
        self._pool.allocator.share(page for pages in after for page in pages)
        self._pages[:] = after
        self._lengths = self._lengths[chosen]
        self._pool.release(before)

    def fork(self) -> PagedCache:
        """Another cache with the same tokens in the same pages; copies no rows."""
        return self._on_same_pages(self._pages, self._lengths)

    def share(self, page_table: Any, lengths: Any) -> PagedCache:
        """A cache of sequences in pages that are held already, such as a common prefix.

        Parameters
        ----------
        page_table : integer array (batch, pages_per_slot)
            Numbers of pages that this cache or a fork of it holds; entries behind the last page of
            a sequence may hold anything.
        lengths : int or integer array (batch,)
            Tokens of each sequence.

        Returns
        -------
        PagedCache

        Raises
        ------
        ShapeError, DTypeError
            If the table is not two-dimensional, or has no room for the lengths.
        ArgumentError
            If there is no such page, or it is free.

        Examples
        --------
        >>> import numpy as np, qkv.cache
        >>> cache = qkv.cache.PagedCache(page_size=2)
        >>> x = np.ones((1, 1, 5, 4))
        >>> rows = cache.append(x, x)
        >>> prefix = cache.share(cache.page_table[:, :2], 4)
        >>> prefix.lengths, prefix.pages_held, cache.pages_held
        (array([4]), 2, 3)
        """
        table = np.asarray(page_table)
        if table.ndim != 2:
            raise ShapeError(
                f"page_table has shape {table.shape}.", action="Pass (batch, pages_per_slot)."
            )
        table = whole_numbers("page_table", table, table.shape)
        counts = whole_numbers("lengths", lengths, table.shape[:1])
        room = table.shape[1] * self.page_size
        if counts.size and (counts.min() < 0 or counts.max() > room):
            raise ShapeError(
                f"lengths run from {counts.min()} to {counts.max()}; a row of the page_table has "
                f"room for {room} tokens.",
                action="Give each sequence as many pages as its tokens need.",
            )
        needed = -(-counts // self.page_size)
        pages = [row[:n].tolist() for row, n in zip(table, needed, strict=True)]
        return self._on_same_pages(pages, counts)

    def reset(self) -> None:
        """Forget all tokens, and release their pages."""
        held = [page for pages in self._pages for page in pages]
        self._pages.clear()
        self._lengths = np.zeros((), np.int64)
        self._pool.release(held)

    def kv_extent(self, new: int) -> tuple[int, int]:
        """`(kv_len, kv_offset)` of the rows that `append` of `new` tokens would hand out."""
        new = checked_integer(0, "new", new)
        longest = int(self._lengths.max(initial=0)) + new
        return -(-longest // self.page_size) * self.page_size, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """A fork, which is as independent as a copy."""
        return self.fork()

    def _on_same_pages(self, pages: list[list[int]], lengths: Lengths) -> PagedCache:
        self._pool.allocator.share(page for held in pages for page in held)
        other = object.__new__(type(self))
        other.dtype = self.dtype
        other._begin(self._pool)
        other._pages[:] = [list(held) for held in pages]
        other._lengths = lengths.copy()
        return other

    def _pages_for(
        self, pages: list[list[int]], before: Lengths, new_tokens: NewTokens
    ) -> list[list[int]]:
        """Lists of pages with room for what arrives, none of which others hold where it writes."""
        size, allocator = self.page_size, self._pool.allocator
        writes = [
            held[-1]
            for held, start, new in zip(pages, before, new_tokens.new_lens, strict=True)
            if new and start % size
        ]
        copies = {
            page: writers - (allocator.references(page) == writers)
            for page, writers in Counter(writes).items()
        }
        ends = -(-(before + new_tokens.new_lens) // size)
        more = sum(int(end) - len(held) for held, end in zip(pages, ends, strict=True))
        fresh = self._pool.take(more + sum(copies.values()), new_tokens)
        found = []
        for held, start, new, end in zip(pages, before, new_tokens.new_lens, ends, strict=True):
            now = list(held)
            if new and start % size and copies[now[-1]]:
                copies[now[-1]] -= 1
                self._pool.copy_page(now[-1], fresh[-1])
                self._pool.release(now[-1:])
                now[-1] = fresh.pop()
            now += [fresh.pop() for _ in range(int(end) - len(now))]
            found.append(now)
        return found

    def _write(self, before: Lengths, new_tokens: NewTokens) -> None:
        counts = new_tokens.new_lens
        batch = np.repeat(np.arange(len(before)), counts)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        new = np.arange(len(batch)) - starts
        slot, row = np.divmod(before[batch] + new, self.page_size)
        self._pool.write(new_tokens, self.page_table[batch, slot], row, batch, new)

    def _rows(self, before: Lengths) -> Rows:
        key, value = self._pool.paged(self.page_table)
        part = Part(key, value, (qkv.KeyLengths(self._lengths.copy()),), 0)
        return Rows((part,), as_offset(before.copy()))


def _release_all(pool: PagePool, pages: list[list[int]]) -> None:
    """Release the pages of a cache that is garbage-collected."""
    pool.release([page for held in pages for page in held])
