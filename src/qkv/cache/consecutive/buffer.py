"""Rows of all sequences side by side, in arrays that are replaced by larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from qkv.bridges import bridge_of
from qkv.cache.arguments import Lengths, longest
from qkv.cache.encoding import Encoding
from qkv.cache.memory import Views, memory_with
from qkv.cache.new_tokens import NewTokens
from qkv.cache.stored_rows import Part
from qkv.call.binding.options import OptionValues

__all__ = ["BufferPart", "RowBuffer"]


@dataclass(slots=True)
class RowBuffer:
    """Arrays `(*leading, capacity, ...)` of keys and values, written at each sequence's own row.

    Attributes
    ----------
    arrays : tuple
        As `NewTokens.arrays`, with `capacity` in place of the number of new rows.
    of_key : int
        How many of them belong to the keys.
    key_offset : array or None
        What the encoding has taken from the keys.
    axis : int
        The dimension that counts rows.
    library : str
        Whose arrays they are.
    """

    arrays: tuple[Any, ...]
    of_key: int
    key_offset: Any
    axis: int
    library: str
    _views: Views = field(default_factory=Views, init=False, repr=False, compare=False)

    @classmethod
    def like(cls, new_tokens: NewTokens, capacity: int) -> RowBuffer:
        """An empty one for rows like those that arrive."""
        axis, library = len(new_tokens.row_format.leading[0]), new_tokens.row_format.library
        return cls(
            tuple(_room(a, axis, capacity, library) for a in new_tokens.arrays),
            new_tokens.of_key,
            new_tokens.key_offset,
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
        _copy(arrays, self.arrays, _runs(None, start, stop - start), self.axis)
        return replace(self, arrays=arrays)

    def write(self, new_tokens: NewTokens, start: Lengths, counts: Lengths) -> None:
        """Put the first `counts` of the new rows at row `start` of each sequence."""
        stored = memory_with(self.library).written(self.arrays, self._views)
        is_step = counts.ndim == 1 and len(counts) > _FEW and longest(counts) == 1
        is_on_host = is_step and all(type(array) is np.ndarray for array in stored)
        if is_on_host and start.min() < start.max():
            _copy_tokens(stored, new_tokens.arrays, start, counts)
        else:
            _copy(stored, new_tokens.arrays, _runs(start, None, counts), self.axis)

    def read(self, start: int, stop: int, encoding: Encoding) -> tuple[Any, Any]:
        """Key and value rows from `start` to `stop` of all sequences, without a copy."""
        index = (*(slice(None),) * self.axis, slice(start, stop))
        stored = tuple([a[index] for a in self.arrays])
        key, value = stored[: self.of_key], stored[self.of_key :]
        return encoding.decode(key, self.key_offset), encoding.decode(value, None)

    def part(
        self,
        start: int,
        stop: int,
        encoding: Encoding,
        masks: tuple[Any, ...],
        kv_offset: Any,
    ) -> Part:
        """The same rows with masks, from which position on they are."""
        if self.library == "torch" and len(self.arrays) == 2:
            key, value = self.arrays
            return BufferPart.of((key, value), (start, stop), masks, kv_offset)
        return Part(*self.read(start, stop, encoding), masks, kv_offset)

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


class BufferPart(Part):
    """Rows of two tensors, views of which are made when somebody asks for key or value.

    torch takes longer for that than attention to a few keys takes.
    """

    __slots__ = ("_span", "_whole")

    _whole: tuple[Any, Any]
    """The tensors of all keys and of all values."""
    _span: tuple[int, int]
    """The first row, and the one behind the last."""

    @classmethod
    def of(
        cls,
        whole: tuple[Any, Any],
        span: tuple[int, int],
        masks: tuple[Any, ...],
        kv_offset: Any,
    ) -> BufferPart:
        """The rows of `span` with these masks."""
        part, put = object.__new__(cls), object.__setattr__
        put(part, "_whole", whole)
        put(part, "_span", span)
        put(part, "masks", masks)
        put(part, "kv_offset", kv_offset)
        return part

    def __getattr__(self, name: str) -> Any:
        """Key or value, for which Python comes here as long as they have not been made."""
        if name not in ("key", "value"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        start, stop = self._span
        rows = self._whole[name == "value"].narrow(-2, start, stop - start)
        object.__setattr__(self, name, rows)
        return rows

    def _attention(
        self, query: Any, variants: tuple[Any, ...], options: OptionValues, return_lse: bool
    ) -> Any:
        whole = getattr(self, "_whole", None)  # A copy with other fields has none.
        if whole is not None and type(query) is type(whole[0]):
            attention_to_span = bridge_of(type(query)).attention_to_span
            results = attention_to_span(query, *whole, self._span, variants, options, return_lse)
            if results is not None:
                return results
        return super()._attention(query, variants, options, return_lse)


def _room(like: Any, axis: int, capacity: int, library: str) -> Any:
    shape = (*like.shape[:axis], capacity, *like.shape[axis + 1 :])
    return memory_with(library).empty(shape, like)


class _Run(NamedTuple):
    """`length` rows from row `source` on, which go to row `target` and following ones.

    They are those of the sequence with this index, or of all if it is ().
    """

    sequence: tuple[int, ...]
    target: int
    source: int
    length: int


def _runs(target: Lengths | None, source: Lengths | None, counts: Lengths) -> list[_Run]:
    """The rows from `source` of each sequence to row `target`, in as few runs as there can be.

    None stands for row 0 of all.
    """
    if counts.size == 1:
        to_row = 0 if target is None else target.item()
        from_row = 0 if source is None else source.item()
        return [_Run((), to_row, from_row, counts.item())]
    numbers = [
        [0] * counts.size if each is None else each.ravel().tolist()
        for each in (target, source, counts)
    ]
    if not counts.size:
        return []
    if all(len(set(of_each)) == 1 for of_each in numbers):
        return [_Run((), *[of_each[0] for of_each in numbers])]
    return list(map(_Run, product(*map(range, counts.shape)), *numbers))


_FEW = 8
"""Sequences up to which the token of each is copied by itself: to index by arrays takes longer."""


def _copy_tokens(
    targets: Sequence[Any], sources: Sequence[Any], start: Lengths, counts: Lengths
) -> None:
    """Copy the first row of each sequence that has one to row `start`."""
    having = np.flatnonzero(counts)
    places = start[having]
    for written, rows in zip(targets, sources, strict=True):
        written[having, :, places] = rows[having, :, 0]


def _copy(targets: Sequence[Any], sources: Sequence[Any], runs: list[_Run], axis: int) -> None:
    """Copy rows of each source to its target, along an axis."""
    for sequence, target, source, length in runs:
        prefix = (*sequence, *(slice(None),) * (axis - len(sequence)))
        place = (*prefix, slice(target, target + length))
        is_part = sequence or length != sources[0].shape[axis]
        for written, rows in zip(targets, sources, strict=True):
            if is_part:
                rows = rows[(*prefix, slice(source, source + length))]
            written[place] = rows
