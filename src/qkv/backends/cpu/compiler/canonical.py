"""A text form of the values that a kernel is made from, to be hashed for the kernel cache."""

from __future__ import annotations

import struct
from dataclasses import fields, is_dataclass

from qkv.problem.language.expressions import Node, fields_of


def canonical(value: object) -> str:
    """A text that equal values have in common, and that no two different ones have.

    Values are None, booleans, integers, floats, strings, and tuples, dataclasses and expressions of
    values. Each distinct part is one line, `number: type` and its content or the numbers of its
    parts, so the length is linear in the distinct parts, where writing out an expression whose
    nodes are shared may take forever. Floats are written by their bits: -0.0 is not 0.0.

    Raises
    ------
    TypeError
        If a part is of any other type.
    """
    numbers: dict[str, int] = {}
    known: dict[int, int] = {}
    waiting = [value]
    while waiting:
        part = waiting[-1]
        parts = _parts(part)
        missing = [p for p in parts if id(p) not in known]
        if missing:
            waiting += missing
            continue
        content = _content(part) or " ".join(str(known[id(p)]) for p in parts)
        line = f"{type(part).__module__}.{type(part).__qualname__} {content}"
        known[id(part)] = numbers.setdefault(line, len(numbers))
        waiting.pop()
    return "\n".join(f"{number}: {line}" for line, number in numbers.items())


def _parts(value: object) -> tuple[object, ...]:
    if isinstance(value, tuple):
        return value
    if isinstance(value, Node):
        return fields_of(value)
    if is_dataclass(value):
        return tuple(getattr(value, field.name) for field in fields(value))
    return ()


def _content(value: object) -> str:
    """The text of a value without that of its parts."""
    if isinstance(value, float):
        return struct.pack(">d", value).hex()
    if value is None or isinstance(value, str | int):
        return repr(value)
    if isinstance(value, tuple | Node) or is_dataclass(value):
        return ""
    raise TypeError(f"{type(value).__name__} has no canonical text")
