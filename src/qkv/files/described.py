"""Files of this package's own: safetensors whose metadata say in JSON what the arrays are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.errors import FileError
from qkv.files.regular import require_regular, unreadable
from qkv.files.writing import replace_file

__all__ = ["read_described", "reader_of", "schema_of", "write_described"]

Array = NDArray[Any]
T = TypeVar("T")

_KEY = "qkv"
"""The key under which the metadata of a file describe it."""

_READERS = {"qkv-record": "qkv.Record.load", "qkv-model-record": "qkv.ModelRecord.load"}
"""What reads the files of each schema."""

_DTYPES = {
    "BOOL": "?", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8",
    "U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip


def write_described(
    path: str | os.PathLike[str],
    schema: str,
    version: int,
    about: Mapping[str, Any],
    arrays: Mapping[str, Array],
) -> None:
    """Write arrays and what they are; the file is never seen half-written.

    Raises
    ------
    FileError
        The file cannot be written.
    """
    from safetensors.numpy import save

    header = json.dumps({"schema": schema, "version": version, **about})
    # `np.ascontiguousarray` would give a single number a dimension.
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    replace_file(path, save(dense, {_KEY: header}))


def read_described(
    path: str | os.PathLike[str],
    schema: str,
    version: int,
    what: str,
    made_of: Callable[[dict[str, Any], dict[str, Array]], T],
) -> T:
    """What `made_of` makes of the header and the arrays of a file.

    Parameters
    ----------
    path : path
    schema : str
        What the file has to say that it is.
    version : int
        The newest that is read; the first is 1.
    what : str
        The same in words, for errors.
    made_of : callable (header, arrays)

    Raises
    ------
    FileError
        The file is missing, broken, of another kind, or nothing can be made of it.
    """
    from safetensors import SafetensorError

    name = repr(os.fspath(path))
    written = "Write it with record.save(path)."
    require_regular(path, "Pass the file that record.save(path) wrote.")
    try:
        header = _header(path)
        if header.get("schema") != schema:
            reader = _READERS.get(str(header.get("schema")))
            raise FileError(
                f"{name} is a safetensors file, but not a {what}.",
                action=f"Read it with {reader}(path)." if reader else written,
            )
        if header.get("version") not in range(1, version + 1):
            raise FileError(
                f"{name} has version {shown(header.get('version'), 20)}; this reads 1 to "
                f"{version}.",
                action="Read it with the version of qkv that wrote it.",
            )
        return made_of(header, _arrays(path))
    except FileError:
        raise
    except OSError as error:
        raise unreadable(name, error) from error
    except (
        SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError,
        NotImplementedError, OverflowError,
    ) as error:  # fmt: skip
        reason = str(error).partition("\n")[0][:200]
        raise FileError(f"{name} is not a {what} ({reason}).", action=written) from error


def schema_of(path: str | os.PathLike[str]) -> str | None:
    """What a file says of itself that it is; None if it says nothing or cannot be read."""
    from safetensors import SafetensorError

    if not os.path.isfile(path):  # Opening a pipe waits for a writer.
        return None
    try:
        schema = _header(path).get("schema")
    except (SafetensorError, OSError, ValueError, RecursionError):
        return None
    return schema if isinstance(schema, str) else None


def reader_of(metadata: Mapping[str, str]) -> str | None:
    """The name of what reads a file with these metadata; None if it is not of these files."""
    try:
        return _READERS.get(str(_described(metadata).get("schema")))
    except (ValueError, RecursionError):
        return None


def _arrays(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Read the arrays of a file; `safetensors.numpy` writes bfloat16, but does not read it."""
    from ml_dtypes import bfloat16
    from safetensors import deserialize

    with open(path, "rb") as file:
        # safetensors declares no types for it.
        entries = deserialize(file.read())  # type: ignore[no-untyped-call]
    return {
        name: np.ndarray(
            entry["shape"],
            bfloat16 if entry["dtype"] == "BF16" else _DTYPES[entry["dtype"]],
            bytearray(entry["data"]),
        )
        for name, entry in entries
    }


def _header(path: str | os.PathLike[str]) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        return _described(file.metadata() or {})


def _described(metadata: Mapping[str, str]) -> dict[str, Any]:
    header = json.loads(metadata.get(_KEY, "{}"))
    return header if isinstance(header, dict) else {}
