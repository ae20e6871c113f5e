"""The base of caches that store each sequence in consecutive rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeVar

import numpy as np

from qkv.cache.arguments import Lengths, require_unchanged, sequence_indices, shorter_lengths
from qkv.cache.consecutive.buffer import RowBuffer
from qkv.cache.encoding import encoding_of
from qkv.cache.new_tokens import Latest, NewTokens, RowFormat, new_tokens
from qkv.cache.stored_rows import Rows, as_offset
from qkv.cache.summary import summary_of
from qkv.errors import ArgumentError, UnsupportedError
from qkv.process.forks import RenewedLock, on_one_torch_thread

__all__ = ["BufferedCache", "Stored", "nonempty"]

Self = TypeVar("Self", bound="BufferedCache")


class Stored(NamedTuple):
    """What a cache holds: replaced as a whole, so that an exception leaves all of it or nothing.

    Attributes
    ----------
    row_format : RowFormat or None
    buffer : RowBuffer or None
        The rows of each sequence. What lies behind its tokens means nothing.
    lengths : int64 array over the batch dimensions
        Tokens that each sequence has seen.
    origin : int64 array over the batch dimensions
        Position of row 0 of the buffer.
    first : RowBuffer or None
        The first tokens, if they are kept for good.
    """

    row_format: RowFormat | None
    buffer: RowBuffer | None
    lengths: Lengths
    origin: Lengths
    first: RowBuffer | None

    def of_batch(self, shape: tuple[int, ...]) -> Stored:
        """The same before the first tokens of sequences in these dimensions."""
        lengths, origin = (np.broadcast_to(n, shape) for n in (self.lengths, self.origin))
        return self._replace(lengths=lengths, origin=origin)


_NOTHING = Stored(None, None, np.zeros((), np.int64), np.zeros((), np.int64), None)


class BufferedCache(ABC):
    """Sequences in a `RowBuffer`; subclasses decide which rows are stored and returned."""

    def __init__(self, dtype: str | None) -> None:
        self._encoding = encoding_of(dtype)
        self._writing = RenewedLock()
        self._latest = Latest()
        self.dtype = dtype
        self.reset()

    def __repr__(self) -> str:
        return summary_of(self)

    def reset(self) -> None:
        """Forget all tokens, and give their memory back; any shapes may come next."""
        self._stored = _NOTHING

    @property
    def lengths(self) -> Lengths:
        """Tokens that each sequence has seen, an int64 array over the batch dimensions."""
        return self._stored.lengths.copy()

    @property
    def q_offset(self) -> Any:
        """Position of the next token: an int, or an int64 array where sequences differ."""
        return as_offset(self._stored.lengths)

    @property
    def nbytes(self) -> int:
        """Memory that keys and values take, in bytes, with what is free in it."""
        buffers = (self._stored.buffer, self._stored.first)
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def read(self) -> Rows:
        """The stored rows, for queries at `q_offset` and later.

        Raises
        ------
        ArgumentError
            If the cache is empty.
        """
        return self._rows(self._stored, self._stored.lengths, None, at_end=False)

    @on_one_torch_thread
    def append(self, key: Any, value: Any, new_lens: Any = None) -> Rows:
        """Write new tokens and hand out all rows that they may attend to.

        Parameters, result and errors are those of `qkv.cache.Cache.append`.
        """
        stored = self._stored
        if self._writing.is_mine():
            raise UnsupportedError(
                "a cache is written to in the middle of a call of the same thread.",
                [("called from", "a finalizer or a signal handler")],
                "Append to it outside of them.",
            )
        # Two threads that write behind the same tokens would mix their rows.
        with self._writing.lock:
            require_unchanged(stored, self._stored)
            held = stored.lengths.shape
            arrived = new_tokens(
                key, value, new_lens, stored.row_format, held, self._encoding, stored.buffer,
                False, self._latest,
            )  # fmt: skip
            batch_shape = arrived.new_lens.shape
            before = stored if held == batch_shape else stored.of_batch(batch_shape)
            self._check_room(before.lengths, arrived.new_lens)
            # Rows behind the tokens that are there count once they are all there.
            after = self._written(before, arrived)
            self._replace(stored, after)
        return self._rows(after, before.lengths, int(key.shape[-2]), at_end=new_lens is None)

    def truncate(self, lengths: Any) -> None:
        """Forget all tokens but the first `lengths` of each sequence.

        Parameters and errors are those of `qkv.cache.Cache.truncate`.
        """
        stored = self._stored
        kept = self._checked(stored, shorter_lengths(lengths, stored.lengths))
        self._replace(stored, stored._replace(lengths=kept))

    @on_one_torch_thread
    def reorder(self, indices: Any) -> None:
        """Make sequence i of the batch what sequence `indices[i]` was; copies all rows.

        Parameters and errors are those of `qkv.cache.Cache.reorder`.
        """
        stored = self._stored
        row_format, buffer, lengths, origin, first = stored
        chosen = sequence_indices(indices, lengths.shape)
        if row_format is None or buffer is None:
            return
        after = Stored(
            row_format.with_batch(len(chosen)),
            buffer.reordered(chosen),
            lengths[chosen],
            origin[chosen],
            None if first is None else first.reordered(chosen),
        )
        self._replace(stored, after)

    @on_one_torch_thread
    def fork(self: Self) -> Self:
        """Another cache with the same tokens; copies all rows."""
        stored = self._stored
        other = self.on_same_rows()
        other._stored = stored._replace(
            buffer=None if stored.buffer is None else stored.buffer.copy(),
            first=None if stored.first is None else stored.first.copy(),
        )
        return other

    __copy__ = fork

    def on_same_rows(self: Self) -> Self:
        """Another cache with these tokens in the same memory, to which one of the two may write."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    @abstractmethod
    def kv_extent(self, new: int) -> tuple[int, int]:
        """`(kv_len, kv_offset)` of the rows that `append` of `new` tokens would hand out."""

    @abstractmethod
    def _written(self, stored: Stored, arrived: NewTokens) -> Stored:
        """What is stored when new tokens have been written behind those that are there."""

    @abstractmethod
    def _rows(self, stored: Stored, before: Lengths, new: int | None, *, at_end: bool) -> Rows:
        """Rows of what is stored, for `new` queries, or any, from position `before`.

        `at_end` says that the last of `new` is the last token of each sequence.
        """

    def _check_room(self, before: Lengths, counts: Lengths) -> None:
        """An error if there is none for as many tokens."""
        return

    def _checked(self, stored: Stored, lengths: Lengths) -> Lengths:
        """Lengths that the cache can go back to; an error if it cannot."""
        return lengths

    def _replace(self, before: Stored, after: Stored) -> None:
        """Replace what the cache holds; an error if another thread has replaced it by now."""
        require_unchanged(before, self._stored)
        self._stored = after


def nonempty(buffer: RowBuffer | None) -> RowBuffer:
    """The buffer, if tokens have come."""
    if buffer is None:
        raise ArgumentError("the cache is empty.", action="Append keys and values first.")
    return buffer
