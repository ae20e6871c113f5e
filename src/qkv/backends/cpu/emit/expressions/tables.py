"""The arrays that score mods and masks read, as they lie in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import DOUBLE, FLOAT, Value
from qkv.problem.spec import TableSpec

INTEGER_TYPES = {
    "bool": (8, False), "int8": (8, True), "int16": (16, True), "int32": (32, True),
    "int64": (64, True), "uint8": (8, False), "uint16": (16, False), "uint32": (32, False),
}  # fmt: skip
"""Bits of an element, and whether it is signed."""


@dataclass(frozen=True, slots=True)
class TableView:
    """A table at run time: its first byte, and the size and byte stride of each dimension."""

    spec: TableSpec
    pointer: Value
    sizes: tuple[Value, ...]
    strides: tuple[Value, ...]


def raw_type(dtype: str) -> Any:
    """The LLVM type in which an element lies in memory."""
    if dtype == "float32":
        return FLOAT
    if dtype == "float64":
        return DOUBLE
    return ir.IntType(INTEGER_TYPES.get(dtype, (16, False))[0])


def item_bytes(dtype: str) -> int:
    """Bytes of an element of a table."""
    return (
        storage.ITEM_BYTES[dtype] if dtype in storage.ITEM_BYTES else INTEGER_TYPES[dtype][0] // 8
    )
