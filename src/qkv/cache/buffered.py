"""The base of caches that store each sequence in consecutive rows."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, TypeVar

import numpy as np

from qkv.cache.arguments import Lengths, sequence_indices, shorter_lengths
from qkv.cache.buffer import RowBuffer
from qkv.cache.encoding import encoding_of
from qkv.cache.new_tokens import NewTokens, RowFormat, check, encode
from qkv.cache.stored_rows import Rows, as_offset
from qkv.errors import ArgumentError

__all__ = ["BufferedCache"]

Self = TypeVar("Self", bound="BufferedCache")


class BufferedCache(ABC):
    """Sequences in a `RowBuffer`; subclasses decide which rows are stored and returned.

    Row 0 of the buffer holds position `_origin` of its sequence.
    """

    def __init__(self, dtype: str | None) -> None:
        self._encoding = encoding_of(dtype)
        self.dtype = dtype
        self.reset()

    def reset(self) -> None:
        """Forget all tokens, and give their memory back; any shapes may come next."""
        self._row_format: RowFormat | None = None
        self._buffer: RowBuffer | None = None
        self._lengths: Lengths = np.zeros((), np.int64)
        self._origin: Lengths = np.zeros((), np.int64)

    @property
    def lengths(self) -> Lengths:
        """Tokens that each sequence has seen, an int64 array over the batch dimensions."""
        return self._lengths.copy()

    @property
    def q_offset(self) -> Any:
        """Position of the next token: an int, or an int64 array where sequences differ."""
        return as_offset(self.lengths)

    @property
    def nbytes(self) -> int:
        """Memory that keys and values take, in bytes, with what is free in it."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def read(self) -> Rows:
        """The stored rows, for queries at `q_offset` and later."""
        return self._rows(self._lengths, self._lengths)

    def append(self, key: Any, value: Any, new_lens: Any = None) -> Rows:
        """Write new tokens and hand out all rows that they may attend to.

        Parameters, result and errors are those of `qkv.cache.Cache.append`.
        """
        row_format, counts = check(key, value, new_lens, self._row_format, batched=False)
        before = np.broadcast_to(self._lengths, row_format.batch_shape)
        self._check_room(before, counts)
        new_tokens = encode(key, value, row_format, counts, self._encoding)
        buffer, origin = self._with_room(new_tokens, before)
        buffer.write(new_tokens, before - origin, counts)
        self._row_format, self._buffer, self._origin = row_format, buffer, origin
        self._lengths = before + counts
        return self._rows(before, self._lengths)

    def truncate(self, lengths: Any) -> None:
        """Forget all tokens but the first `lengths` of each sequence.

        Parameters and errors are those of `qkv.cache.Cache.truncate`.
        """
        self._lengths = self._checked(shorter_lengths(lengths, self._lengths))

    def reorder(self, indices: Any) -> None:
        """Make sequence i of the batch what sequence `indices[i]` was; copies all rows.

        Parameters and errors are those of `qkv.cache.Cache.reorder`.
        """
        self._reorder(sequence_indices(indices, self._lengths.shape))

    def fork(self: Self) -> Self:
        """Another cache with the same tokens; copies all rows."""
        other = copy.copy(self)
        other._buffer = None if self._buffer is None else self._buffer.copy()
        return other

    @abstractmethod
    def kv_extent(self, new: int) -> tuple[int, int]:
        """`(kv_len, kv_offset)` of the rows that `append` of `new` tokens would hand out."""

    @abstractmethod
    def _with_room(self, new_tokens: NewTokens, before: Lengths) -> tuple[RowBuffer, Lengths]:
        """A buffer with room for what arrives, and the position of its row 0."""

    @abstractmethod
    def _rows(self, before: Lengths, after: Lengths) -> Rows:
        """Rows for queries from position `before`, when the last key stands before `after`."""

    def _check_room(self, before: Lengths, counts: Lengths) -> None:
        """An error if there is none for as many tokens."""
        return

    def _reorder(self, indices: Lengths) -> None:
        """Reorder what is kept; the indices are checked."""
        if self._row_format is None or self._buffer is None:
            return
        self._buffer = self._buffer.reordered(indices)
        self._row_format = self._row_format.with_batch(len(indices))
        self._lengths, self._origin = self._lengths[indices], self._origin[indices]

    def _checked(self, lengths: Lengths) -> Lengths:
        """Lengths that the cache can go back to; an error if it cannot."""
        return lengths

    def _nonempty_buffer(self) -> RowBuffer:
        if self._buffer is None:
            raise ArgumentError("the cache is empty.", action="Append keys and values first.")
        return self._buffer
