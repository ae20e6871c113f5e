"""safetensors: 8 bytes of header length, a JSON header, the arrays one after another.

Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from typing import Any

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
from qkv.files.described import reader_of

__all__ = ["read_safetensors"]

MAX_HEADER = 100_000_000  # as the format's own library

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": BFLOAT16}


def read_safetensors(source: Source) -> Arrays:
    """Query, key, value and tokens of a safetensors file."""
    (length,) = struct.unpack("<Q", source.at(0, 8))
    possible = min(MAX_HEADER, source.size - 8)
    if length > possible:
        raise source.error(f"says that its header has {length} bytes; at most {possible} can be")
    # The header is a JSON object: the format was recognised by its opening brace.
    header: dict[str, Any] = _json(source, source.at(8, length), "its header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(m, str) for m in metadata.values()):
        raise source.error("has metadata that is not a JSON object of strings")
    reader = reader_of(metadata)
    if reader is not None:
        raise source.error(
            "is a saved record, which holds more than q, k and v",
            f"Read it with {reader}(path), or look at it with qkv inspect or qkv lab.",
        )
    _require_contiguous(source, header, source.size - 8 - length)
    query, key, value = (
        _entry(source, name, header[name], 8 + length).array() for name in spelling(source, header)
    )
    tokens = _tokens(source, metadata.pop("tokens", None))
    return Arrays(query, key, value, tokens, metadata)


def _json(source: Source, text: bytes, what: str) -> Any:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise source.error(f"names {shown(twice)} twice in {what}")
        return names

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except FileError:
        raise
    except RecursionError as error:
        raise source.error(f"nests {what} too deeply") from error
    except ValueError as error:
        raise source.error(f"has no valid JSON in {what} ({error})") from error


def _require_contiguous(source: Source, header: dict[str, Any], room: int) -> None:
    """Every array lies within the file, and none shares a byte with another."""
    spans = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise source.error(f"does not give dtype, shape and data_offsets of {shown(name)}")
        span = entry["data_offsets"]
        if (
            not isinstance(span, list)
            or len(span) != 2
            or any(type(offset) is not int for offset in span)
            or not 0 <= span[0] <= span[1] <= room
        ):
            raise source.error(
                f"puts {shown(name)} at {shown(span)}, outside its {room} bytes of data"
            )
        spans.append((span[0], span[1], name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            fault = "overlaps the array before it" if start < end else "leaves a hole before it"
            raise source.error(f"puts {shown(name)} at {start}, which {fault}")
        end = stop
    if end != room:
        raise source.error(f"has {room} bytes of data, of which its header explains {end}")


def _entry(source: Source, name: str, entry: dict[str, Any], data: int) -> Entry:
    dtype = checked_dtype(source, name, entry["dtype"], _DTYPES)
    shape = checked_shape(source, name, entry["shape"])
    start, stop = entry["data_offsets"]
    count = nbytes(dtype, shape)
    if count != stop - start:
        raise source.error(
            f"says that {shown(name)} is {entry['dtype']} {list(shape)}, {count} bytes, "
            f"and holds {stop - start}"
        )

    def load() -> bytearray:
        source.file.seek(data + start)
        return source.take(source.file, count, shown(name))

    return Entry(dtype, shape, load)


def _tokens(source: Source, text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    tokens = _json(source, text.encode("utf-8", "replace"), "its tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise source.error(
            "has tokens that are not a JSON list of strings",
            "Save metadata={'tokens': json.dumps(tokens)}.",
        )
    return writable(tokens)
