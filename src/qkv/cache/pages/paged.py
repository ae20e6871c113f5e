"""A cache in pages that sequences share until one of them writes."""

from __future__ import annotations

from typing import Any

import numpy as np

import qkv
from qkv.arguments.declarations import checked_size
from qkv.cache.arguments import (
    MOST_ROWS,
    Lengths,
    sequence_indices,
    shorter_lengths,
    viewed,
    whole_numbers,
)
from qkv.cache.encoding import encoding_of
from qkv.cache.new_tokens import NewTokens, new_tokens
from qkv.cache.pages.page_pool import EMPTY, Held, PagePool, Storage
from qkv.cache.stored_rows import Part, Rows, as_offset
from qkv.cache.summary import summary_of
from qkv.errors import ArgumentError, ShapeError
from qkv.process.forks import on_one_torch_thread

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
        page_size = checked_size("page_size", page_size, 1, MOST_ROWS)
        self.dtype = dtype
        self._begin(PagePool(page_size, num_pages, encoding_of(dtype)))

    def _begin(self, pool: PagePool) -> None:
        self._pool = pool
        self._holder = pool.holder_of(self)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._pool.page_size

    def __repr__(self) -> str:
        return summary_of(self)

    @property
    def lengths(self) -> Lengths:
        """Tokens that each sequence has seen, int64 (batch,)."""
        return self._holder.held.lengths.copy()

    @property
    def q_offset(self) -> Any:
        """Position of the next token: an int, or an int64 array where sequences differ."""
        return as_offset(self._holder.held.lengths)

    @property
    def page_table(self) -> Lengths:
        """Numbers of pages, int64 (batch, pages_per_slot); 0 behind the last of a sequence."""
        return self._holder.held.table.copy()

    @property
    def pages_held(self) -> int:
        """Different pages that the sequences of this cache hold."""
        return len(np.unique(self._holder.held.pages(self.page_size)))

    @property
    def pages_free(self) -> int:
        """Pages of the storage that neither this cache nor a fork of it holds."""
        self._pool.count()
        return self._pool.allocator.num_free

    @property
    def nbytes(self) -> int:
        """Memory that all pages take, those of forks and free ones included, in bytes."""
        self._pool.count()
        return self._pool.nbytes

    def read(self) -> Rows:
        """The stored rows, for queries at `q_offset` and later.

        Raises
        ------
        ArgumentError
            If the cache is empty.
        """
        held, storage = self._holder.held, self._pool.storage
        if storage.row_format is None or not held.lengths.ndim:
            raise ArgumentError("the cache is empty.", action="Append keys and values first.")
        return self._rows(held, storage, held.lengths, None, at_end=False)

    @on_one_torch_thread
    def append(self, key: Any, value: Any, new_lens: Any = None) -> Rows:
        """Write new tokens and hand out all rows that they may attend to.

        Parameters, result and errors are those of `qkv.cache.Cache.append`; there is no room
        when `num_pages` was given and too few are free.
        """
        pool, held = self._pool, self._holder.held
        pool.count()
        storage = pool.storage
        arrived = self._new_tokens(key, value, new_lens, held, storage)
        before = held.lengths
        if before.shape != arrived.new_lens.shape:  # These are the first tokens.
            before = np.broadcast_to(before, arrived.new_lens.shape)
        with pool.lock:
            pool.begin_change(self._holder, held)
            if pool.storage is not storage:  # A fork may have been the first to append.
                arrived = self._new_tokens(key, value, new_lens, held, pool.storage)
            after, replaced = self._with_room(held, before, arrived)
            self._write(after.table, before, arrived)
            pool.change(self._holder, after, [], replaced)
            return self._rows(
                after, pool.storage, before, int(key.shape[-2]), at_end=new_lens is None
            )

    def _new_tokens(
        self, key: Any, value: Any, new_lens: Any, held: Held, storage: Storage
    ) -> NewTokens:
        """New rows, encoded, if they fit what is stored."""
        first = storage.row_format
        if first is not None:  # The pool is shared with forks, which may have another batch size.
            first = first.with_batch(_batch_size(key))
        holds = None if first is None else storage
        return new_tokens(
            key, value, new_lens, first, held.lengths.shape, self._pool.encoding, holds,
            True, self._pool.latest,
        )  # fmt: skip

    def truncate(self, lengths: Any) -> None:
        """Forget all tokens but the first `lengths` of each sequence, and release their pages.

        Parameters and errors are those of `qkv.cache.Cache.truncate`.
        """
        held, size = self._holder.held, self.page_size
        after = Held.of(held.table, shorter_lengths(lengths, held.lengths), size)
        slots = np.arange(held.table.shape[1])
        gone = slots >= -(-after.lengths[..., None] // size)
        less = held.table[gone & (slots < -(-held.lengths[..., None] // size))]
        self._pool.shrink(self._holder, held, after, less)

    def reorder(self, indices: Any) -> None:
        """Make sequence i of the batch what sequence `indices[i]` was; copies no rows.

        Parameters and errors are those of `qkv.cache.Cache.reorder`.
        """
        pool, held = self._pool, self._holder.held
        chosen = sequence_indices(indices, held.lengths.shape)
        after = Held.of(held.table[chosen], held.lengths[chosen], self.page_size)
        more, less = after.pages(self.page_size), held.pages(self.page_size)
        with pool.lock:
            pool.begin_change(self._holder, held)
            pool.change(self._holder, after, more, less)
            pool.give_back()

    def fork(self) -> PagedCache:
        """Another cache with the same tokens in the same pages; copies no rows."""
        other = self._empty()
        with self._pool.lock:
            return other._holding(self._holder.held)

    __copy__ = on_same_rows = fork

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
        table = viewed("page_table", page_table)
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
        other = self._empty()
        with self._pool.lock:
            return other._holding(Held.of(table, counts, self.page_size))

    def reset(self) -> None:
        """Forget all tokens, and release their pages."""
        held = self._holder.held
        self._pool.shrink(self._holder, held, EMPTY, held.pages(self.page_size))

    def kv_extent(self, new: int) -> tuple[int, int]:
        """`(kv_len, kv_offset)` of the rows that `append` of `new` tokens would hand out."""
        new = checked_size("new", new, 0, MOST_ROWS)
        longest = int(self._holder.held.lengths.max(initial=0)) + new
        return -(-longest // self.page_size) * self.page_size, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """A fork, which is as independent as a copy."""
        return self.fork()

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: with the cache goes the whole storage that it shares with forks."""
        return {**self.__dict__, "_holder": self._holder.held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._holder = self._pool.holder_of(self)
        self._pool.counted_anew(self._holder, state["_holder"])

    def _empty(self) -> PagedCache:
        """A cache without tokens on the same storage."""
        other = object.__new__(type(self))
        other.dtype = self.dtype
        other._begin(self._pool)
        return other

    def _holding(self, held: Held) -> PagedCache:
        """This cache, which was empty, with pages that others hold; the lock is held."""
        self._pool.begin()
        self._pool.change(self._holder, held, held.pages(self.page_size), [])
        return self

    def _with_room(self, held: Held, before: Lengths, arrived: NewTokens) -> tuple[Held, list[int]]:
        """Pages with room for what arrives, and those that were replaced by copies.

        Nobody else holds a page that will be written to.
        """
        size, table, opened, written = self.page_size, held.table, [], []
        after = before + arrived.new_lens
        spans = list(zip(before.tolist(), after.tolist(), strict=True))
        for i, (start, end) in enumerate(spans):
            if start % size and end > start:
                written.append((i, start // size))
            if -(-start // size) < -(-end // size):
                opened.append((i, -(-start // size), -(-end // size)))
        copied = self._shared(table, before, written)
        count = sum(end - first for _, first, end in opened)
        fresh = self._pool.take(count + len(copied), arrived)
        if not fresh:
            return Held(table if held.lengths.ndim else _wider(table, len(spans), 0), after), []
        most = max(table.shape[1], *(end for _, _, end in opened), 0)
        table = _wider(table, len(spans), most)
        replaced = []
        for entry in copied:
            replaced.append(int(table[entry]))
            table[entry] = fresh.pop()
            self._pool.copy_page(replaced[-1], int(table[entry]))
        for i, first, end in opened:
            table[i, first:end] = [fresh.pop() for _ in range(end - first)]
        return Held(table, after), replaced

    def _shared(
        self, table: Lengths, before: Lengths, written: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Which entries name pages that have to be copied before they are written to.

        The last to write to a page that nobody else holds needs no copy. It is the one with the
        most tokens there, so that no other reads what it writes if an exception ends the change.
        """
        allocator, entries = self._pool.allocator, []
        left: dict[int, int] = {}
        for entry in sorted(written, key=lambda entry: before.item(entry[0]) % self.page_size):
            page = int(table[entry])
            held = left.get(page, allocator._times_held(page))
            if held > 1:
                left[page] = held - 1
                entries.append(entry)
        return entries

    def _write(self, table: Lengths, before: Lengths, arrived: NewTokens) -> None:
        size, counts = self.page_size, arrived.new_lens
        spans = list(zip(before.tolist(), counts.tolist(), strict=True))
        if sum(count for _, count in spans) <= _FEW:
            entries: list[tuple[Any, ...]] = []
            for i, (start, count) in enumerate(spans):
                for new in range(count):
                    slot, row = divmod(start + new, size)
                    entries.append((table.item(i, slot), row, i, new))
        else:
            batch = np.repeat(np.arange(len(before)), counts)
            tokens = np.arange(len(batch)) - np.repeat(np.cumsum(counts) - counts, counts)
            slots, rows = np.divmod(before[batch] + tokens, size)
            entries = [(table[batch, slots], rows, batch, tokens)]
        self._pool.write(arrived, entries)

    def _rows(
        self, held: Held, storage: Storage, before: Lengths, new: int | None, *, at_end: bool
    ) -> Rows:
        key, value = storage.paged(self._pool.encoding, held.table.copy())
        part = Part(key, value, (qkv.KeyLengths(held.lengths.copy()),), 0)
        return Rows((part,), as_offset(before), new, _is_new_at_end=at_end, _cache=self)


_FEW = 8
"""Rows up to which each is written by itself: to index by arrays takes longer."""


def _batch_size(key: Any) -> int:
    """The first dimension of what may be no array at all, which is refused later."""
    if getattr(key, "is_nested", False):  # A nested tensor has no shape.
        return 0
    shape = getattr(key, "shape", ())
    return shape[0] if shape else 0


def _wider(table: Lengths, batch: int, slots: int) -> Lengths:
    """A table of more entries, 0 where there were none."""
    wider = np.zeros((batch, slots), np.int64)
    wider[: len(table), : table.shape[1]] = table
    return wider
