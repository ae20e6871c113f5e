"""Rows of all sequences side by side, in arrays that are replaced by larger ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qkv.cache.arguments import Lengths
from qkv.cache.encoding import Encoding
from qkv.cache.memory import memory_with
from qkv.cache.new_tokens import NewTokens

__all__ = ["RowBuffer"]


@dataclass(slots=True)
class RowBuffer:
    """Arrays `(*leading, capacity, ...)` of keys and values, written at each sequence's own row.

    Attributes
    ----------
    arrays : tuple
        As `NewTokens.arrays`, with `capacity` in place of the number of new rows.
    of_key : int
        How many of them belong to the keys.
    axis : int
        The dimension that counts rows.
    library : str
        Whose arrays they are.
    """

    arrays: tuple[Any, ...]
    of_key: int
    axis: int
    library: str

    @classmethod
    def like(cls, new_tokens: NewTokens, capacity: int) -> RowBuffer:
        """An empty one for rows like those that arrive."""
        axis, library = len(new_tokens.row_format.leading[0]), new_tokens.row_format.library
        return cls(
            tuple(_room(a, axis, capacity, library) for a in new_tokens.arrays),
            new_tokens.of_key,
            axis,
            library,
        )

    @property
    def capacity(self) -> int:
        """Rows that each sequence has room for."""
        return int(self.arrays[0].shape[self.axis])

    @property
    def nbytes(self) -> int:
        """Memory that the arrays take."""
        return sum(int(a.nbytes) for a in self.arrays)

    def grown(self, capacity: int, start: Lengths, stop: Lengths) -> RowBuffer:
        """Another buffer that begins with the rows from `start` to `stop` of each sequence."""
        arrays = tuple(_room(a, self.axis, capacity, self.library) for a in self.arrays)
        for new, old in zip(arrays, self.arrays, strict=True):
            _copy(new, np.zeros_like(start), old, start, stop - start, self.axis)
        return replace(self, arrays=arrays)

    def write(self, new_tokens: NewTokens, start: Lengths, counts: Lengths) -> None:
        """Put the first `counts` of the new rows at row `start` of each sequence."""
        for stored, new in zip(self.arrays, new_tokens.arrays, strict=True):
            _copy(stored, start, new, np.zeros_like(start), counts, self.axis)

    def read(self, start: int, stop: int, encoding: Encoding) -> tuple[Any, Any]:
        """Key and value rows from `start` to `stop` of all sequences, without a copy."""
        index = (slice(None),) * self.axis + (slice(start, stop),)
        stored = tuple(a[index] for a in self.arrays)
        key, value = stored[: self.of_key], stored[self.of_key :]
        return encoding.decode(key, "key"), encoding.decode(value, "value")

    def reordered(self, indices: Lengths) -> RowBuffer:
        """A copy in which sequence i is what sequence `indices[i]` of the first dimension was."""
        memory = memory_with(self.library)
        arrays = []
        for old in self.arrays:
            new = memory.empty((len(indices), *old.shape[1:]), old)
            for i, index in enumerate(indices):
                new[i] = old[int(index)]
            arrays.append(new)
        return replace(self, arrays=tuple(arrays))

    def copy(self) -> RowBuffer:
        """The same rows in memory of its own."""
        memory = memory_with(self.library)
        arrays = []
        for old in self.arrays:
            new = memory.empty(tuple(old.shape), old)
            new[...] = old
            arrays.append(new)
        return replace(self, arrays=tuple(arrays))


def _room(like: Any, axis: int, capacity: int, library: str) -> Any:
    shape = (*like.shape[:axis], capacity, *like.shape[axis + 1 :])
    return memory_with(library).empty(shape, like)


def _copy(
    target: Any, at: Lengths, source: Any, start: Lengths, counts: Lengths, axis: int
) -> None:
    """Rows from `start` of each sequence of `source` to row `at` of `target`."""
    if not counts.size:
        return
    same_for_all = all((n == n.flat[0]).all() for n in (at, start, counts))
    groups = [()] if same_for_all else list(np.ndindex(*counts.shape))
    for index in groups:
        target_row, source_row, count = (int(n[index].flat[0]) for n in (at, start, counts))
        prefix = (*index, *(slice(None),) * (axis - len(index)))
        target[(*prefix, slice(target_row, target_row + count))] = source[
            (*prefix, slice(source_row, source_row + count))
        ]
