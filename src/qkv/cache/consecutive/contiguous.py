"""A cache in consecutive rows that grows, or has a fixed capacity."""

from __future__ import annotations

from typing import Any

import qkv
from qkv.arguments.declarations import checked_size
from qkv.cache.arguments import MOST_ROWS, Lengths, longest
from qkv.cache.consecutive.buffer import RowBuffer
from qkv.cache.consecutive.buffered import BufferedCache, Stored, nonempty
from qkv.cache.new_tokens import NewTokens
from qkv.cache.stored_rows import Rows, as_offset
from qkv.errors import ShapeError

__all__ = ["ContiguousCache"]


class ContiguousCache(BufferedCache):
    """Keys and values in one array each, written at the end of what is there.

    Parameters
    ----------
    capacity : int, optional
        Tokens that there is room for; all memory is then taken when the first arrive. Unless
        given, memory doubles whenever it is full, so that n tokens are copied at most 2 n times.
    dtype : "int8", optional
        Keep rows as int8 with one scale for each token and kv head (`qkv.cache.quantize`, which
        states the error). Unless given, they stay in the dtype in which they come.

    Raises
    ------
    ArgumentError
        If the capacity is not a whole number of 0 or more, or the dtype is unknown.

    Notes
    -----
    `append` copies the new rows only, and hands out views. Memory for a token of one sequence:
    `num_kv_heads * (head_dim + v_head_dim) * itemsize` bytes, or
    `num_kv_heads * (head_dim + v_head_dim + 8)` as int8; at most twice that while it grows.

    Examples
    --------
    >>> import numpy as np, qkv, qkv.cache
    >>> cache = qkv.cache.ContiguousCache()
    >>> prompt = np.ones((1, 2, 3, 4), np.float32)  # batch, kv heads, tokens, head_dim
    >>> rows = cache.append(prompt, prompt)
    >>> token = np.ones((1, 2, 1, 4), np.float32)
    >>> rows = cache.append(token, token)
    >>> query = np.ones((1, 8, 1, 4), np.float32)
    >>> rows.attention(query, qkv.Causal()).shape, cache.lengths
    ((1, 8, 1, 4), array([4]))
    """

    def __init__(self, capacity: int | None = None, *, dtype: str | None = None) -> None:
        self.capacity = (
            None if capacity is None else checked_size("capacity", capacity, 0, MOST_ROWS)
        )
        super().__init__(dtype)

    def kv_extent(self, new: int) -> tuple[int, int]:
        """`(kv_len, kv_offset)` of the rows that `append` of `new` tokens would hand out."""
        new = checked_size("new", new, 0, MOST_ROWS)
        return longest(self._stored.lengths) + new, 0

    def _check_room(self, before: Lengths, counts: Lengths) -> None:
        if self.capacity is None or longest(before) + longest(counts) <= self.capacity:
            return
        if (before + counts <= self.capacity).all():
            return
        raise ShapeError(
            f"the cache has room for {self.capacity} tokens, {before.max()} are in it and "
            f"{counts.max()} more arrive.",
            action="Make one with a larger capacity.",
        )

    def _written(self, stored: Stored, arrived: NewTokens) -> Stored:
        _, buffer, before, origin, first = stored
        after = before + arrived.new_lens
        needed = longest(after)
        if buffer is None:
            buffer = RowBuffer.like(arrived, needed if self.capacity is None else self.capacity)
        elif needed > buffer.capacity:
            buffer = buffer.grown(max(needed, 2 * buffer.capacity), origin, before)
        buffer.write(arrived, before, arrived.new_lens)
        return Stored(arrived.row_format, buffer, after, origin, first)

    def _rows(self, stored: Stored, before: Lengths, new: int | None, *, at_end: bool) -> Rows:
        after = stored.lengths
        stop = longest(after)
        same_length = after.size == 1 or bool((after == stop).all())
        masks: tuple[Any, ...] = () if same_length else (qkv.KeyLengths(after.copy()),)
        part = nonempty(stored.buffer).part(0, stop, self._encoding, masks, 0)
        return Rows((part,), as_offset(before), new, _is_new_at_end=at_end)
