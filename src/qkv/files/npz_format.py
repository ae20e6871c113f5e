"""npz: a zip file of npy arrays.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
"""

from __future__ import annotations

import ast
import io
import re
import struct
import sys
import warnings
import zipfile
import zlib
from typing import Any

import numpy as np

from qkv.errors import FileError
from qkv.files.contents import (
    BFLOAT16,
    Arrays,
    Entry,
    Source,
    checked_dtype,
    checked_shape,
    nbytes,
    shown,
    spelling,
    writable,
)

__all__ = ["read_npz"]

MAX_DIRECTORY = 1 << 20  # bytes: about ten thousand arrays
MAX_HEADER = 1024  # a plain array needs at most 700

_DTYPES = {f"{order}f{size}": f"{order}f{size}" for order in "<>=" for size in (2, 4, 8)}
# NumPy has no code of its own for bfloat16 and saves it as two opaque bytes.
_DTYPES |= {"<V2": BFLOAT16, "|V2": BFLOAT16}
_STRINGS = re.compile(r"(?:[<>=]U|[|]?S)[1-9][0-9]{0,6}")


def read_npz(source: Source) -> Arrays:
    """Query, key, value and tokens of an npz file."""
    try:
        with zipfile.ZipFile(_BoundedReads(source)) as archive:
            return _read(source, archive)
    except FileError:
        raise
    # What zipfile and zlib let through when a file was damaged on purpose.
    except (
        zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, RuntimeError,
        NotImplementedError, AttributeError, LookupError, OverflowError,
    ) as error:  # fmt: skip
        raise source.error(f"is a broken zip file ({shown(str(error))})") from error


class _BoundedReads(io.BytesIO):
    """The file for `zipfile`, which otherwise reads a directory of any declared size at once."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self.source.file.seek(offset, whence)

    def tell(self) -> int:
        return self.source.file.tell()

    def read(self, count: int | None = -1, /) -> bytes:
        if count is not None and count > MAX_DIRECTORY:
            raise self.source.error(
                f"has a zip directory of {count} bytes; at most {MAX_DIRECTORY} are read"
            )
        return self.source.file.read(-1 if count is None else count)


def _read(source: Source, archive: zipfile.ZipFile) -> Arrays:
    members: dict[str, zipfile.ZipInfo] = {}
    places: set[int] = set()
    for info in archive.infolist():
        name = info.filename.removesuffix(".npy")
        if name in members:
            raise source.error(f"names {shown(name)} twice in its directory")
        if info.header_offset in places:
            raise source.error(f"has {shown(name)} and another array in one place")
        members[name] = info
        places.add(info.header_offset)
    query, key, value = (
        _entry(source, archive, name, members[name]).array() for name in spelling(source, members)
    )
    tokens = None
    if "tokens" in members:
        tokens = _tokens(source, _entry(source, archive, "tokens", members["tokens"]))
    return Arrays(query, key, value, tokens, {})


def _entry(source: Source, archive: zipfile.ZipFile, name: str, info: zipfile.ZipInfo) -> Entry:
    what = shown(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
        raise source.error(f"packs {what} in a way that is not read", "Use numpy.savez.")
    room = source.size if info.compress_type == zipfile.ZIP_STORED else source.most_inflated
    if info.file_size > room:
        raise source.error(
            f"says that {what} unpacks to {info.file_size} bytes; at most {room} are read",
            "Save it uncompressed, with numpy.savez.",
        )
    with archive.open(info) as stream:
        prefix = stream.read(10)
        if len(prefix) < 10 or prefix[:7] != b"\x93NUMPY\x01":
            raise source.error(f"has no npy header of version 1 in {what}", "Use numpy.savez.")
        (length,) = struct.unpack("<H", prefix[8:])
        if length > MAX_HEADER:
            raise source.error(
                f"has an npy header of {length} bytes in {what}; at most {MAX_HEADER} are read",
                "Save plain arrays with numpy.savez.",
            )
        descr, column_major, shape = _header(source, name, stream.read(length))
    if name == "tokens":
        if not isinstance(descr, str) or not _STRINGS.fullmatch(descr):
            raise source.error(
                f"holds tokens as {shown(descr)}; pickled objects are never loaded",
                "Save them as an array of strings: numpy.array(tokens, dtype=str).",
            )
        dtype = descr
    else:
        dtype = checked_dtype(source, name, descr, _DTYPES)
    start = 10 + length
    count = nbytes(dtype, shape)
    if start + count != info.file_size:
        raise source.error(
            f"says that {what} is {descr} {shape}, {count} bytes, and holds "
            f"{info.file_size - start}"
        )

    def load() -> bytearray:
        with archive.open(info) as stream:
            stream.read(start)  # rather than seek, which would give up the checksum
            return source.take(stream, count, what)

    return Entry(dtype, shape, load, column_major)


def _header(source: Source, name: str, text: bytes) -> tuple[Any, bool, tuple[int, ...]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of the compiler, with the file's own words in them
            header = ast.literal_eval(text.decode("latin-1").strip())
        descr, column_major, shape = header["descr"], header["fortran_order"], header["shape"]
    except (
        ValueError,
        SyntaxError,
        TypeError,
        LookupError,
        RecursionError,
        MemoryError,
        Warning,
    ) as error:
        raise source.error(f"has a broken npy header in {shown(name)}") from error
    if not isinstance(column_major, bool) or not isinstance(shape, tuple) or len(header) != 3:
        raise source.error(f"has a broken npy header in {shown(name)}: {shown(header)}")
    return descr, column_major, checked_shape(source, name, shape)


def _tokens(source: Source, entry: Entry) -> tuple[str, ...]:
    if len(entry.shape) != 1:
        raise source.error(f"has tokens of shape {entry.shape}", "Save a flat list of strings.")
    array = entry.array()
    # NumPy would make an invalid string of these, or none.
    if array.dtype.kind == "U" and (array.view(np.uint32) > sys.maxunicode).any():
        raise source.error("has tokens that are not text: code points beyond U+10FFFF")
    try:
        tokens = [t.decode("utf-8") if isinstance(t, bytes) else t for t in array.tolist()]
    except ValueError as error:
        raise source.error(f"has tokens that are not text ({shown(str(error))})") from error
    return writable(tokens)
