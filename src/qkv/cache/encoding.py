"""How a cache stores rows: unchanged, or as int8 with one scale for each row.

An encoding turns rows `(..., num_kv_heads, length, dim)` into arrays that share all dimensions up
to the length, so that storage can keep them side by side without knowing what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from qkv.arguments.declarations import shown
from qkv.arrays import library_of
from qkv.cache.arguments import Lengths
from qkv.cache.memory import Memory, memory_with
from qkv.errors import ArgumentError, DTypeError, ShapeError
from qkv.problem.stored_rows import Quantized

__all__ = ["Encoding", "encoding_of", "quantize"]


FEWEST_ROWS = 16
"""Keys of a head from which their mean is taken; the mean of fewer may be far from that of all."""


class Encoding(Protocol):
    """How a cache stores rows."""

    def key_offset(self, keys: Any, memory: Memory, new_lens: Lengths) -> Any:
        """What is taken from all keys of a cache, found of those that arrive first, or None.

        The first `new_lens` of each sequence are tokens.
        """
        ...

    def encode(
        self, key: Any, value: Any, memory: Memory, offset: Any
    ) -> Sequence[tuple[Any, ...]]:
        """The arrays to keep for keys less an offset, None for none, and those for values."""
        ...

    def decode(self, stored: tuple[Any, ...], offset: Any) -> Any:
        """These arrays as a key or value that `qkv.attention` takes."""
        ...


class Unquantized:
    """Rows in their own dtype."""

    def key_offset(self, keys: Any, memory: Memory, new_lens: Lengths) -> Any:
        """None: keys stay as they are."""
        return None

    def encode(
        self, key: Any, value: Any, memory: Memory, offset: Any
    ) -> Sequence[tuple[Any, ...]]:
        """The rows themselves."""
        return (key,), (value,)

    def decode(self, stored: tuple[Any, ...], offset: Any) -> Any:
        """The array itself."""
        return stored[0]


class Int8:
    """One byte for each number and one float32 scale for each row; keys less their mean.

    The mean of each head and channel is that of the keys which arrive first, if they are at least
    `FEWEST_ROWS`, and is kept with the rows as long as there are any.
    """

    def key_offset(self, keys: Any, memory: Memory, new_lens: Lengths) -> Any:
        """The mean, or None."""
        return memory.mean_of_rows(keys, new_lens, FEWEST_ROWS)

    def encode(
        self, key: Any, value: Any, memory: Memory, offset: Any
    ) -> Sequence[tuple[Any, ...]]:
        """`(values, scales)` of each."""
        return memory.int8_with_scales((key, value), offset)

    def decode(self, stored: tuple[Any, ...], offset: Any) -> Any:
        """`Quantized` rows."""
        values, scales = stored
        return Quantized(values, scales, offset)


_ENCODINGS: dict[str | None, Callable[[], Encoding]] = {None: Unquantized, "int8": Int8}


def encoding_of(dtype: str | None) -> Encoding:
    """A new encoding, as the `dtype` of a cache asks for it."""
    if not isinstance(dtype, str | None) or dtype not in _ENCODINGS:
        raise ArgumentError(
            f"dtype={shown(dtype)} is not a way to keep rows.",
            action='Pass "int8", or None to keep them in the dtype in which they come.',
        )
    return _ENCODINGS[dtype]()


def quantize(rows: Any) -> Quantized:
    """Round rows to int8 with one scale for each token and kv head.

        scales[..., j] = max(abs(rows[..., j, :])) / 127
        values[..., j, :] = round(rows[..., j, :] / scales[..., j])

    Parameters
    ----------
    rows : array (..., num_kv_heads, length, dim)
        Keys or values of NumPy, torch or JAX, of any floating type.

    Returns
    -------
    Quantized
        Of int8 values and float32 scales, in torch tensors for torch and else in NumPy arrays.
        A row of zeros has scale 0. A row is NaN when it is read if it holds NaN, infinity, or a
        float64 number above 127 times the largest float32 number, since its scale is infinite.

    Raises
    ------
    DTypeError, ShapeError, UnsupportedError
        `rows` is not an array of one dimension or more, or torch or JAX differentiates or traces
        it.

    Notes
    -----
    An entry changes by at most half a step, `max(abs(row)) / 254`. So a score changes by at most
    `scale * sum(abs(query)) * max(abs(key)) / 254`, and an output entry, through the values alone,
    by at most the largest of `max(abs(value)) / 254`. Memory: `dim + 4` bytes a row, against
    `2 dim` in a 16-bit type and `4 dim` in float32.

    Examples
    --------
    >>> import numpy as np, qkv.cache
    >>> key = qkv.cache.quantize(np.array([[[0.1, -12.7, 6.2]]], np.float32))
    >>> key.values, key.scales
    (array([[[   1, -127,   62]]], dtype=int8), array([[0.1]], dtype=float32))
    """
    memory = memory_with(library_of(rows, "rows").name)
    own = memory.rows_of(rows, "rows")
    kind = str(own.dtype).removeprefix("torch.")
    if not kind.startswith(("float", "bfloat")):
        raise DTypeError(
            f"rows have dtype {kind}, not a floating type.",
            action="Convert them, to float32 for example.",
        )
    if not own.ndim:
        raise ShapeError("rows is a single number.", action="Pass rows of (..., length, dim).")
    [(values, scales)] = memory.int8_with_scales([own])
    return Quantized(memory.restored(values), memory.restored(scales))
