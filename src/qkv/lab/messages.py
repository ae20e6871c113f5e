"""Requests and answers of the lab, as JSON and as bytes.

Numbers in JSON are written as `qkv.files.json_numbers` has it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import LARGEST, is_integer
from qkv.errors import ArgumentError, QkvError

__all__ = ["Answer", "Request", "failure", "in_page", "key_of", "read_request"]


@dataclass(frozen=True, slots=True)
class Request:
    """One question: an id that the answer repeats, a method and its parameters.

    `shown` is the number of what the page shows, as its data has it.
    """

    id: int
    method: str
    params: Mapping[str, Any]
    shown: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a session answers: a result for JSON, and arrays that travel as bytes."""

    result: Any
    arrays: Sequence[NDArray[Any]] = field(default=())

    def buffers(self) -> list[dict[str, Any]]:
        """Type and shape of each array."""
        return [{"dtype": str(a.dtype), "shape": list(a.shape)} for a in self.arrays]

    def message(self, request_id: int) -> dict[str, Any]:
        """The answer as a JSON object, without the bytes of its arrays."""
        message = {"id": request_id, "ok": True, "result": self.result}
        return {**message, "buffers": self.buffers()} if self.arrays else message

    def frame(self, request_id: int) -> bytes:
        """Length of the header (4 bytes, little-endian), the header, the arrays one by one."""
        header = json.dumps(self.message(request_id), allow_nan=False).encode()
        # Spaces make the arrays begin at a multiple of 8, where a page can view them in place.
        header += b" " * (-(len(header) + 4) % 8)
        data = [np.ascontiguousarray(a).astype(a.dtype.newbyteorder("<")) for a in self.arrays]
        return struct.pack("<I", len(header)) + header + b"".join(a.tobytes() for a in data)


def failure(request_id: int, error: Exception) -> dict[str, Any]:
    """The answer to a request that failed."""
    if isinstance(error, QkvError):
        seen = "".join(f" {label}: {text}." for label, text in error.seen)
        said = {"message": error.fact + seen, "action": error.action}
    else:
        said = {
            "message": "this could not be computed.",
            "action": "The terminal or the notebook's log says why.",
        }
    return {"id": request_id, "ok": False, "error": said}


def read_request(given: Any) -> Request:
    """A request out of parsed JSON.

    Raises
    ------
    ArgumentError
        It is not an object with an id, a method, parameters, and perhaps the number of what
        the page shows.
    """
    if not isinstance(given, dict):
        raise ArgumentError("the request is not a JSON object.")
    number, method, params = given.get("id"), given.get("method"), given.get("params", {})
    if not is_integer(number) or abs(number) > LARGEST:
        raise ArgumentError("the id of the request is not a whole number.")
    if not isinstance(method, str) or not isinstance(params, dict):
        raise ArgumentError("the request has no method, or its parameters are not an object.")
    return Request(number, method, params, _read_shown(given))


def _read_shown(given: Mapping[str, Any]) -> int | None:
    """The number of what a page shows, if it says one."""
    number = given.get("shown")
    if number is not None and not is_integer(number):
        raise ArgumentError("the number of what the page shows is not a whole number.")
    return number


def read_view(given: Any) -> tuple[dict[str, str | int | float], int | None]:
    """The view that a page sends to be saved, flat and of texts and numbers, and what it shows.

    Raises
    ------
    ArgumentError
        It is something else.
    """
    view = given.get("view") if isinstance(given, dict) else None
    if not isinstance(view, dict) or not all(map(_is_text_or_number, view.values())):
        raise ArgumentError('the request is not a view, {"view": {name: text or number}}.')
    return view, _read_shown(given)


def _is_text_or_number(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))


def key_of(method: str, params: Mapping[str, Any] | None = None) -> str:
    """The name of a result in `data["results"]`.

    Examples
    --------
    >>> key_of("errata"), key_of("head", {"layer": 5, "head": 4})
    ('errata', 'head:{"head":4,"layer":5}')
    """
    if not params:
        return method
    return f"{method}:{json.dumps(params, sort_keys=True, separators=(',', ':'))}"


def in_page(value: Any) -> str:
    """JSON that can stand inside a `<script>` element: nothing in it ends or opens one.

    Examples
    --------
    >>> in_page(["</script>"])
    '["\\\\u003c/script\\\\u003e"]'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
