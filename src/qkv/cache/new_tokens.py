"""Keys and values of new tokens, checked against what a cache holds before any is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from qkv.arrays import kind_of, library_of
from qkv.cache.arguments import Lengths, whole_numbers
from qkv.cache.encoding import Encoding
from qkv.cache.memory import Memory, RowsOfAlike, memory_with
from qkv.errors import ArgumentError, DTypeError, ShapeError

__all__ = ["Latest", "NewTokens", "RowFormat", "new_tokens"]

_FLOATING = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The library, shapes, dtype and device that all rows of a cache share.

    Attributes
    ----------
    library : str
        "numpy", "torch" or "jax".
    leading : tuple of two tuples of int
        Dimensions of keys and of values before the length: batch dimensions and heads.
    dims : (int, int)
        Length of a key and of a value.
    dtype, device : tuple of str
        Of keys and of values.
    """

    library: str
    leading: tuple[tuple[int, ...], tuple[int, ...]]
    dims: tuple[int, int]
    dtype: tuple[str, str]
    device: tuple[str, str]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading dimensions without the heads."""
        return self.leading[0][:-1]

    def is_of(self, i: int, rows: Any, library: str) -> bool:
        """Whether keys, i = 0, or values, i = 1, of this library have this format."""
        shape, leading = rows.shape, self.leading[i]
        return (
            library == self.library
            and len(shape) == len(leading) + 2
            and shape == (*leading, shape[-2], self.dims[i])
            and _name(rows.dtype) == self.dtype[i]
            and _device(rows, library) == self.device[i]
        )

    def with_batch(self, size: int) -> RowFormat:
        """The same with another first batch dimension."""
        if self.leading[0][0] == size == self.leading[1][0]:
            return self
        key, value = ((size, *leading[1:]) for leading in self.leading)
        return replace(self, leading=(key, value))


class NewTokens(NamedTuple):
    """Keys and values of new tokens, as the cache stores them.

    Attributes
    ----------
    row_format : RowFormat
    arrays : tuple
        The stored form of the keys, then that of the values; of NumPy if it lies in main memory.
    of_key : int
        How many of the arrays belong to the keys.
    key_offset : array or None
        What the encoding has taken from the keys.
    new_lens : int64 array (*batch_shape)
        Tokens of each sequence; rows behind them are padding.
    """

    row_format: RowFormat
    arrays: tuple[Any, ...]
    of_key: int
    key_offset: Any
    new_lens: Lengths


_MOST_ATTEMPTS = 16
"""How often it is noted what tokens of one cache are like. Where strides change with each token,
to note them takes longer than to check them."""


class Latest:
    """What the tokens that came last were like. More like them are not checked again."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._attempts = 0
        self._known: tuple[RowFormat, Memory, RowsOfAlike, Lengths] | None = None

    def __reduce__(self) -> tuple[type[Latest], tuple[()]]:
        """A copy of a cache sees its tokens for itself."""
        return Latest, ()

    def alike(
        self, key: Any, value: Any, first: RowFormat | None, held: tuple[int, ...]
    ) -> tuple[RowFormat, Memory, tuple[Any, Any], Lengths] | None:
        """The format, memory, rows and numbers of such tokens; None if they have to be checked."""
        known = self._known
        if known is None:
            return None
        row_format, memory, rows_of, counts = known
        if row_format is not first or counts.shape != held:
            return None
        rows = rows_of(key, value)
        return None if rows is None else (row_format, memory, rows, counts)

    def note(self, key: Any, value: Any, row_format: RowFormat, memory: Memory) -> None:
        """Remember tokens that were checked, if they are the second of their kind."""
        seen = key.shape, value.shape, row_format
        if self._seen != seen or self._attempts == _MOST_ATTEMPTS:
            self._seen = seen
            return
        self._attempts += 1
        rows_of = memory.rows_of_alike(key, value)
        if rows_of is not None:
            counts = np.full(row_format.batch_shape, key.shape[-2], np.int64)
            self._known = row_format, memory, rows_of, counts


class Holds(Protocol):
    """Rows that came before, and what the encoding takes from the keys that join them."""

    @property
    def key_offset(self) -> Any: ...


def new_tokens(
    key: Any,
    value: Any,
    new_lens: Any,
    first: RowFormat | None,
    held: tuple[int, ...],
    encoding: Encoding,
    holds: Holds | None,
    batched: bool,
    latest: Latest,
) -> NewTokens:
    """New rows, checked against those that came `first` and encoded to join what a cache `holds`.

    `held` are the batch dimensions of the sequences that are there, empty if there are none.
    `batched` asks for exactly four dimensions.
    """
    alike = latest.alike(key, value, first, held) if new_lens is None else None
    if alike is not None and holds is not None:
        like_first, memory, rows, counts = alike
        offset = holds.key_offset
        keys, values = encoding.encode(*rows, memory, offset)
        return NewTokens(like_first, (*keys, *values), len(keys), offset, counts)
    library = of_value = library_of(key, "key").name
    if type(value) is not type(key):
        of_value = library_of(value, "value").name
    libraries = library, of_value
    memory = memory_with(library)
    key_rows = memory.rows_of(key, "key")
    value_rows = memory_with(of_value).rows_of(value, "value")
    row_format = first
    if (
        first is None
        or first.batch_shape != held
        or not first.is_of(0, key, library)
        or not first.is_of(1, value, of_value)
        or key.shape[-2] != value.shape[-2]
    ):
        row_format = _checked_format(key, value, libraries, first, held, batched)
    assert row_format is not None
    new = int(key.shape[-2])
    if new_lens is None:
        counts = np.empty(row_format.batch_shape, np.int64)
        counts.fill(new)
    else:
        counts = whole_numbers("new_lens", new_lens, row_format.batch_shape)
        if counts.size and (counts.min() < 0 or counts.max() > new):
            raise ShapeError(
                f"new_lens runs from {counts.min()} to {counts.max()}; {new} rows arrive.",
                _seen(key, value),
                "Give each sequence a number of tokens from 0 to the rows that arrive.",
            )
    if holds is None:
        offset = encoding.key_offset(key_rows, memory, counts)
    else:
        offset = holds.key_offset
        latest.note(key, value, row_format, memory)
    keys, values = encoding.encode(key_rows, value_rows, memory, offset)
    return NewTokens(row_format, (*keys, *values), len(keys), offset, counts)


def _checked_format(
    key: Any,
    value: Any,
    libraries: tuple[str, str],
    first: RowFormat | None,
    held: tuple[int, ...],
    batched: bool,
) -> RowFormat:
    """The format of new rows that are not known to be like the first ones."""
    if min(key.ndim, value.ndim) < 2 or key.shape[-2] != value.shape[-2]:
        raise ShapeError(
            "key and value are not rows of as many tokens.",
            _seen(key, value),
            "Pass (..., num_kv_heads, new, dim).",
        )
    if batched and (key.ndim != 4 or value.ndim != 4):
        raise ShapeError(
            f"key has {key.ndim} dimensions and value {value.ndim}; pages are for one batch "
            "dimension.",
            _seen(key, value),
            "Pass (batch, num_kv_heads, new, dim).",
        )
    row_format = RowFormat(
        libraries[0],
        (tuple(key.shape[:-2]), tuple(value.shape[:-2])),
        (key.shape[-1], value.shape[-1]),
        (_name(key.dtype), _name(value.dtype)),
        (_device(key, libraries[0]), _device(value, libraries[1])),
    )
    for name, leading in zip(("key", "value"), row_format.leading, strict=True):
        if leading[:-1] != held and len(leading) == len(held) + 1 > 1:
            given, own = (" x ".join(map(str, sizes)) for sizes in (leading[:-1], held))
            raise ShapeError(
                f"{name} has a batch of {given}, and the cache one of {own}.",
                _seen(key, value),
                "Use a cache of its own for each batch, or reorder this one to the new batch.",
            )
    if first is not None and (row_format != first or libraries[1] != first.library):
        _compare(row_format, libraries, first, _seen(key, value))
    for name, dtype in zip(("key", "value"), row_format.dtype, strict=True):
        if dtype.rpartition(".")[2] not in _FLOATING:
            raise DTypeError(
                f"{name} has dtype {dtype}.",
                _seen(key, value),
                f"Pass one of {', '.join(_FLOATING)}, in the machine's byte order.",
            )
    if row_format.dtype[0] != row_format.dtype[1]:
        raise DTypeError(
            f"key has dtype {row_format.dtype[0]} and value {row_format.dtype[1]}.",
            _seen(key, value),
            "Convert them to one type, as for qkv.attention.",
        )
    if row_format.leading[0] != row_format.leading[1]:
        raise ShapeError(
            f"key has leading dimensions and heads {row_format.leading[0]}, "
            f"value {row_format.leading[1]}.",
            _seen(key, value),
            "Pass a key and a value for each token and kv head.",
        )
    if libraries[0] != libraries[1]:
        raise DTypeError(
            f"key is an array of {libraries[0]} and value of {libraries[1]}.",
            _seen(key, value),
            "Pass both as arrays of one library.",
        )
    if row_format.device[0] != row_format.device[1]:
        raise ArgumentError(
            f"key is on {row_format.device[0]} and value on {row_format.device[1]}.",
            _seen(key, value),
            "Move them to one device.",
        )
    return row_format


def _compare(
    row_format: RowFormat,
    libraries: tuple[str, str],
    first: RowFormat,
    seen: list[tuple[str, str]],
) -> None:
    """Raise an error if new rows differ in format from the first ones."""
    for i, name in enumerate(("key", "value")):
        if libraries[i] != first.library:
            raise DTypeError(
                f"{name} is an array of {libraries[i]}; the cache has arrays of {first.library}.",
                seen,
                "Convert it to the library of those that came first, or reset the cache.",
            )
        if (row_format.leading[i], row_format.dims[i]) != (first.leading[i], first.dims[i]):
            raise ShapeError(
                f"{name} has leading dimensions and heads {row_format.leading[i]} and rows of "
                f"{row_format.dims[i]}; the cache has {first.leading[i]} and {first.dims[i]}.",
                seen,
                "Use one cache for each layer and batch.",
            )
        if row_format.dtype[i] != first.dtype[i]:
            raise DTypeError(
                f"{name} has dtype {row_format.dtype[i]}; the cache has {first.dtype[i]}.",
                seen,
                "Convert it to the type of those that came first.",
            )
        if row_format.device[i] != first.device[i]:
            raise ArgumentError(
                f"{name} is on {row_format.device[i]}; the cache is on {first.device[i]}.",
                seen,
                "Move it to the device of those that came first.",
            )


@lru_cache(maxsize=64)
def _name(thing: Any) -> str:
    """The name of a type or a device; it is kept because torch takes long to write it."""
    return str(thing)


def _device(array: Any, library: str) -> str:
    """The device of a torch tensor; other arrays are read from main memory."""
    return _name(array.device) if library == "torch" else "cpu"


def _seen(key: Any, value: Any) -> list[tuple[str, str]]:
    """What an error says of new rows."""
    return [("key", _shown(key)), ("value", _shown(value))]


def _shown(array: Any) -> str:
    if kind_of(array) is None:
        return type(array).__name__
    where = f" on {array.device}" if kind_of(array) == "torch" else ""
    return f"{array.dtype} {tuple(array.shape)}{where}"
