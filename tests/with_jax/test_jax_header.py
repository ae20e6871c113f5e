"""The structures that are read from Python are those of the header that jaxlib ships."""

import ctypes
import re
from pathlib import Path

import pytest

pytest.importorskip("jax", minversion="0.10", reason="compared with jax 0.10 or later")

import jax

from qkv.bridges.jax import ffi as jax_ffi

SIMPLE = {
    "size_t": ctypes.c_size_t,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "XLA_FFI_Handler_Traits": ctypes.c_uint32,
    "XLA_FFI_TypeId": ctypes.c_int64,  # a structure of that alone
    "XLA_FFI_Extension_Type": ctypes.c_int,
    "XLA_FFI_InternalExtension_Type": ctypes.c_int,
    "XLA_FFI_Error_Code": ctypes.c_int,
    "XLA_FFI_DataType": ctypes.c_int,
    "XLA_FFI_ExecutionStage": ctypes.c_int,
}
"""C types that are not structures; the last are enumerations."""


def header() -> str:
    """JAX's header without comments, with the names that jax 0.11 and later has."""
    path = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = path.read_text().replace("XLA_FFI_Extension_Base", "XLA_FFI_InternalExtension")
    return re.sub(
        r"//[^\n]*|/\*.*?\*/|^\s*#define _[^\n]*", "", text, flags=re.DOTALL | re.MULTILINE
    )


def declared(name: str) -> list[tuple[str, str]]:
    """(type, name) of each field of a structure of the header."""
    found = re.search(rf"struct {name}\s*\{{(.*?)\}}", header(), re.DOTALL)
    assert found, f"{name} is not in the header"
    fields = []
    for line in filter(None, map(str.strip, found[1].split(";"))):
        function = re.fullmatch(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", line)
        if function:
            fields.append(("void*", function[1]))
            continue
        kind, _, field = line.rpartition(" ")
        fields.append((re.sub(r"\b(const|struct)\b", "", kind).strip(), field))
    return fields


def ctype(kind: str) -> type:
    if kind.endswith("*"):
        return ctypes.c_void_p
    if kind in SIMPLE:
        return SIMPLE[kind]
    return jax_ffi.STRUCTURES[kind]


@pytest.mark.parametrize("name", jax_ffi.STRUCTURES)
def test_fields_lie_where_the_header_puts_them(name: str) -> None:
    ours = jax_ffi.STRUCTURES[name]
    theirs = declared(name)
    names = [field for field, _ in ours._fields_]
    if name == "XLA_FFI_Metadata" and version() < jax_ffi.API_VERSION:
        names.remove("state_type_id")  # not written either
    assert names == [field for _, field in theirs][: len(names)]
    if name != "XLA_FFI_Api":  # read as far as it is used
        assert len(names) == len(theirs)
    twin = type("Twin", (ctypes.Structure,), {"_fields_": [(f, ctype(k)) for k, f in theirs]})
    for field in names:
        mine, right = getattr(ours, field), getattr(twin, field)
        assert (mine.offset, mine.size) == (right.offset, right.size), field


def test_enumerations() -> None:
    text = header()

    def value(word: str) -> int:
        found = re.search(rf"\b{word} = (\d+)", text)
        assert found, word
        return int(found[1])

    names = {"bool": "PRED", "bfloat16": "BF16", "float16": "F16", "float32": "F32",
             "float64": "F64"}  # fmt: skip
    for number, dtype in jax_ffi.DTYPES.items():
        word = names.get(dtype.name) or f"{dtype.kind.replace('i', 's')}{8 * dtype.itemsize}"
        assert value(f"XLA_FFI_DataType_{word.upper()}") == number
    assert value("XLA_FFI_Extension_Metadata") == jax_ffi.EXTENSION_METADATA
    assert value("XLA_FFI_Error_Code_CANCELLED") == jax_ffi.CODE_CANCELLED
    assert value("XLA_FFI_Error_Code_INVALID_ARGUMENT") == jax_ffi.CODE_INVALID_ARGUMENT
    assert value("XLA_FFI_Error_Code_RESOURCE_EXHAUSTED") == jax_ffi.CODE_RESOURCE_EXHAUSTED
    assert value("XLA_FFI_Error_Code_INTERNAL") == jax_ffi.CODE_INTERNAL


def version() -> tuple[int, ...]:
    found = [re.search(rf"XLA_FFI_API_{part} (\d+)", header()) for part in ("MAJOR", "MINOR")]
    return tuple(int(match[1]) for match in found if match)


def test_version() -> None:
    assert version()[0] == jax_ffi.API_VERSION[0]
    assert version()[1] >= jax_ffi.OLDEST_MINOR
