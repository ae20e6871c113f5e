"""A cache of the last tokens, and of some of the first."""

from __future__ import annotations

from typing import Any

import numpy as np

import qkv
from qkv.arguments.declarations import checked, checked_size
from qkv.cache.arguments import MOST_ROWS, Lengths, longest
from qkv.cache.consecutive.buffer import RowBuffer
from qkv.cache.consecutive.buffered import BufferedCache, Stored, nonempty
from qkv.cache.new_tokens import NewTokens
from qkv.cache.stored_rows import Rows, as_offset
from qkv.errors import ArgumentError

__all__ = ["RollingCache"]


@checked
class RollingCache(BufferedCache):
    """The last `window` tokens, and the first `sinks`, at their own positions.

        q_pos - window < kv_pos   or   kv_pos < sinks

    says which keys a query reads; the masks that are handed out say so too, so that decoding is
    exactly attention over all tokens with `SlidingWindow(window - 1, None) | Prefix(sinks)`.

    Parameters
    ----------
    window : int
        Tokens that a query sees, its own among them: the `sliding_window` of Hugging Face.
    sinks : int
        Tokens from the start that are kept for good (StreamingLLM). They keep the positions that
        they have in the text; the paper gives them positions right before the window.
    dtype : "int8", optional
        Keep rows as int8 with one scale for each token and kv head (`qkv.cache.quantize`, which
        states the error). Unless given, they stay in the dtype in which they come.

    Raises
    ------
    ArgumentError
        If a size is not a whole number of its range, or the dtype is unknown.

    Notes
    -----
    Memory for one sequence: at most `2 window + sinks` tokens (and, after a longer append, that
    many and `window`) of `num_kv_heads * (head_dim + v_head_dim) * itemsize` bytes each, or
    `num_kv_heads * (head_dim + v_head_dim + 8)` as int8, however long the text is. The last rows
    move to a new array when one is full, once in `window` tokens. What the last `append` brought
    can always be truncated again; further back, rows may be gone. Source: Xiao et al., "Efficient
    Streaming Language Models with Attention Sinks" (2023).

    Examples
    --------
    >>> import numpy as np, qkv, qkv.cache
    >>> cache = qkv.cache.RollingCache(window=4, sinks=1)
    >>> x = np.random.default_rng(0).normal(size=(1, 1, 100, 8))
    >>> for i in range(100):
    ...     rows = cache.append(x[:, :, i : i + 1], x[:, :, i : i + 1])
    >>> last = rows.attention(x[:, :, -1:], qkv.Causal(), qkv.ALiBi())
    >>> mask = qkv.SlidingWindow(3, None) | qkv.Prefix(1)
    >>> whole = qkv.attention(x, x, x, qkv.Causal(), qkv.ALiBi(), mask)
    >>> bool(np.allclose(last, whole[:, :, -1:])), cache.nbytes
    (True, 1152)
    """

    def __init__(self, window: int, sinks: int = 0, *, dtype: str | None = None) -> None:
        self.window, self.sinks = (
            checked_size("window", window, 1, MOST_ROWS),
            checked_size("sinks", sinks, 0, MOST_ROWS),
        )
        super().__init__(dtype)

    def kv_extent(self, new: int) -> tuple[int, int]:
        """`(kv_len, kv_offset)` of the rows that `append` of `new` tokens would hand out.

        Without sinks, which are a part of their own.
        """
        new = checked_size("new", new, 0, MOST_ROWS)
        length = longest(self._stored.lengths)
        before = min(length, self.window - 1)
        return before + new, length - before

    def _written(self, stored: Stored, arrived: NewTokens) -> Stored:
        _, buffer, before, origin, first = stored
        counts = arrived.new_lens
        after = before + counts
        if buffer is None:
            buffer = RowBuffer.like(arrived, max(longest(after), 1))
        elif longest(after - origin) > buffer.capacity:
            dropped, origin = origin, self._oldest(before)
            needed = longest(after - origin)
            buffer = buffer.grown(max(needed, 2 * self.window), origin - dropped, before - dropped)
        if self.sinks:
            first = RowBuffer.like(arrived, self.sinks) if first is None else first
            start = np.minimum(before, self.sinks)
            first.write(arrived, start, np.minimum(counts, self.sinks - start))
        buffer.write(arrived, before - origin, counts)
        return Stored(arrived.row_format, buffer, after, origin, first)

    def _oldest(self, position: Lengths) -> Lengths:
        """The first position in the window of a query."""
        return np.maximum(position - (self.window - 1), 0)

    def _rows(self, stored: Stored, before: Lengths, new: int | None, *, at_end: bool) -> Rows:
        after, origin = stored.lengths, stored.origin
        start = _smallest(self._oldest(before) - origin)
        stop = max(start, longest(after - origin))
        kv_offset = origin + start
        buffer, encoding = nonempty(stored.buffer), self._encoding
        masks: list[Any] = [self._mask(_smallest(kv_offset))]
        if (after - kv_offset != stop - start).any():
            masks.append(qkv.KeyLengths(after - kv_offset))
        parts = [buffer.part(start, stop, encoding, tuple(masks), as_offset(kv_offset))]
        if stored.first is not None and kv_offset.any():
            before_others = qkv.KeyLengths(np.minimum(self.sinks, kv_offset))
            parts.insert(0, stored.first.part(0, self.sinks, encoding, (before_others,), 0))
        return Rows(tuple(parts), as_offset(before), new, self.window, at_end)

    def _mask(self, first: int) -> qkv.MaskVariant:
        """Which keys from position `first` on a query reads."""
        window = qkv.SlidingWindow(self.window - 1, None)
        return window | qkv.Prefix(self.sinks) if first < self.sinks else window

    def _checked(self, stored: Stored, lengths: Lengths) -> Lengths:
        gone = self._oldest(lengths) < stored.origin
        if gone.any():
            where = tuple(int(i) for i in np.argwhere(gone)[0])
            raise ArgumentError(
                f"sequence {where} cannot be truncated to {lengths[where]} tokens: the window of "
                f"the next begins at {self._oldest(lengths)[where]}, and rows before "
                f"{stored.origin[where]} are gone.",
                action="Truncate no more than the last append, or use a longer window.",
            )
        return lengths


def _smallest(numbers: Lengths) -> int:
    """The smallest of them, 0 if there are none."""
    return int(numbers.min()) if numbers.size else 0
