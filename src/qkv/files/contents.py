"""The types that readers of all formats share: the open file, an array entry, and the result."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from qkv.errors import FileError

Array = NDArray[Any]

BFLOAT16 = "bfloat16"
MAX_DIMENSIONS = 32
MAX_LENGTH = 1 << 48
MAX_EMPTY = 1 << 20  # product of the other lengths of an array without elements
CHUNK = 1 << 20
MAX_INFLATED = 1 << 30  # bytes of one compressed array; a stored one is bounded by the file

_SPELLINGS = (("q", "k", "v"), ("query", "key", "value"))

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """Query, key and value as they were stored; tokens if the file has any; other metadata.

    Examples
    --------
    >>> import numpy as np, qkv.files
    >>> x = np.eye(2)
    >>> qkv.files.Arrays(x, x, x, tokens=None, metadata={}).value.shape
    (2, 2)
    """

    query: Array
    key: Array
    value: Array
    tokens: tuple[str, ...] | None
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Source:
    """An open file, how many bytes it really has, and what to call it in errors.

    One compressed array may unpack to at most `most_inflated` bytes.
    """

    file: BinaryIO
    size: int
    name: str
    most_inflated: int = MAX_INFLATED

    def at(self, offset: int, count: int) -> bytes:
        """`count` bytes at `offset`, all of them."""
        self.file.seek(offset)
        return bytes(self.take(self.file, count, "its header"))

    def take(self, stream: IO[bytes], count: int, what: str) -> bytearray:
        """The next `count` bytes of a stream; memory grows with the bytes that really arrive."""
        data = bytearray()
        while len(data) < count:
            chunk = stream.read(min(CHUNK, count - len(data)))
            if not chunk:
                raise self.error(f"ends within {what}: {count} bytes said, {len(data)} there")
            data += chunk
        return data

    def error(self, fact: str, action: str = "Write the file again.") -> FileError:
        return FileError(f"{self.name} {fact}.", [("size", f"{self.size} bytes")], action)


@dataclass(frozen=True, slots=True)
class Entry:
    """An array whose size has been checked, and how to get its bytes."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], bytearray]
    column_major: bool = False

    def array(self) -> Array:
        """The array, in the machine's byte order."""
        if self.dtype == BFLOAT16:
            import ml_dtypes

            dtype = np.dtype(ml_dtypes.bfloat16)
        else:
            dtype = np.dtype(self.dtype)
        array: Array = np.ndarray(
            self.shape, dtype, self.load(), order="F" if self.column_major else "C"
        )
        return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def shown(text: object) -> str:
    """Something out of a file, quoted, short, and without anything that a terminal would obey."""
    return _REPR.repr(text)


def spelling(source: Source, names: Iterable[str]) -> tuple[str, ...]:
    """The names that a file uses for query, key and value."""
    present = sorted(names)
    spellings = [spelling for spelling in _SPELLINGS if set(spelling) <= set(present)]
    if len(spellings) == 1:
        return spellings[0]
    raise FileError(
        f"{source.name} has both q, k, v and query, key, value."
        if spellings
        else f"{source.name} does not have all of q, k and v.",
        [("arrays", ", ".join(map(shown, present[:12])) or "none")],
        "Name them q, k, v or query, key, value, each once.",
    )


def checked_shape(source: Source, name: str, shape: Any) -> tuple[int, ...]:
    """Lengths that can be multiplied and looped over."""
    if (
        not isinstance(shape, list | tuple)
        or len(shape) > MAX_DIMENSIONS
        or any(type(length) is not int or not 0 <= length < MAX_LENGTH for length in shape)
        # An array without elements has no bytes that its other lengths could be compared with.
        or (0 in shape and math.prod(length for length in shape if length) > MAX_EMPTY)
    ):
        raise source.error(f"gives {shown(name)} the shape {shown(shape)}")
    return tuple(shape)


def checked_dtype(source: Source, name: str, dtype: Any, known: Mapping[str, str]) -> str:
    """NumPy's code of a floating type."""
    if not isinstance(dtype, str) or dtype not in known:
        raise source.error(
            f"holds {shown(name)} as {shown(dtype)}",
            "Save q, k and v as float16, bfloat16, float32 or float64.",
        )
    return known[dtype]


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of an array."""
    return math.prod(shape) * (2 if dtype == BFLOAT16 else np.dtype(dtype).itemsize)


def writable(tokens: Iterable[str]) -> tuple[str, ...]:
    """Tokens without lone surrogates, which no encoding can write."""
    return tuple(t.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for t in tokens)
