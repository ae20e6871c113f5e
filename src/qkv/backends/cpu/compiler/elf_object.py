"""Machine code of an ELF object for x86-64, put into memory without LLVM.

A process whose kernels are all on the disk then never loads LLVM, which takes longer than the
kernels' first calls. Objects that LLVM makes for code in memory hold addresses of 64 bits alone,
so linking is to write those. An object with anything else in it is left to LLVM's own linker.

Source: "System V Application Binary Interface, AMD64 Architecture Processor Supplement", chapter 4.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from qkv.backends.cpu.machine import executable_memory

__all__ = ["ElfObject", "load"]

_IDENTITY = b"\x7fELF\x02\x01\x01"
"""64 bits, little endian, version 1."""
_RELOCATABLE, _X86_64 = 1, 62
_HEADER = struct.Struct("<16xHH20xQ10xHHH")
"""Kind, machine, offset of the sections; size, number, and index of the names of the sections."""
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QIIq")
_ADDRESS = struct.Struct("<Q")
_WRITABLE, _ALLOCATED = 1, 2
_SYMBOLS, _RELOCATIONS, _NO_BITS, _UNWIND = 2, 4, 8, 0x70000001
_UNDEFINED, _FIRST_RESERVED = 0, 0xFF00
_R_X86_64_64 = 1


@dataclass(frozen=True, slots=True)
class _Section:
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry: int

    @property
    def is_loaded(self) -> bool:
        """Tables for unwinding are left out: nothing throws through a kernel."""
        return bool(self.flags & _ALLOCATED) and self.kind != _UNWIND and self.size > 0


class ElfObject:
    """Machine code in memory, which is given back when this object goes."""

    def __init__(self, memory: mmap.mmap, addresses: dict[str, int]) -> None:
        self._addresses = addresses
        # At the end of the process threads may still be in the code, so it is not given back then.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        weakref.finalize(self, memory.close).atexit = False

    def address(self, name: str) -> int:
        return self._addresses[name]


def load(data: bytes, names: tuple[str, ...]) -> ElfObject | None:
    """The functions of an object, ready to be called; None if LLVM has to link it.

    Raises
    ------
    OSError
        If the system refuses memory, or that it be executed.
    """
    if sys.platform != "linux" or data[: len(_IDENTITY)] != _IDENTITY:
        return None
    kind, machine, start, size, count, _ = _HEADER.unpack_from(data)
    if (kind, machine, size) != (_RELOCATABLE, _X86_64, _SECTION.size):
        return None
    table = data[start : start + count * size]
    sections = [_Section(*fields) for fields in _SECTION.iter_unpack(table)]
    places, fixed, total = _places(sections)
    # A forked child has variables of its own.
    own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(total, mmap.PAGESIZE), own)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for index, place in places.items():
        section = sections[index]
        if section.kind != _NO_BITS:
            content = data[section.offset : section.offset + section.size]
            memory[place : place + section.size] = content
    symbols = _symbols(data, sections, places, base)
    if symbols is None:
        return None
    addresses, named = symbols
    is_linked = _relocate(memory, data, sections, places, addresses)
    if not is_linked or not named.keys() >= set(names):
        return None
    executable_memory.make_executable(base, fixed)
    return ElfObject(memory, {name: named[name] for name in names})


def _places(sections: list[_Section]) -> tuple[dict[int, int], int, int]:
    """Where each section lies, the bytes of those that stay as they are, and of all.

    Sections that the code writes to lie on pages of their own, which may not be executed.
    """
    places: dict[int, int] = {}
    end = fixed = 0
    for flags in (0, _WRITABLE):
        for index, section in enumerate(sections):
            if section.is_loaded and section.flags & _WRITABLE == flags:
                places[index] = end = _aligned(end, max(1, section.alignment))
                end += section.size
        end = _aligned(end, mmap.PAGESIZE)
        fixed = fixed or end
    return places, fixed, end


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _symbols(
    data: bytes, sections: list[_Section], places: dict[int, int], base: int
) -> tuple[list[int | None], dict[str, int]] | None:
    """The address of each symbol, None if it has none, and of those that have a name."""
    tables = [section for section in sections if section.kind == _SYMBOLS]
    if len(tables) != 1:
        return None
    (table,) = tables
    strings = sections[table.link].offset
    addresses: list[int | None] = []
    named: dict[str, int] = {}
    content = data[table.offset : table.offset + table.size]
    for name_at, _, _, index, value, _ in _SYMBOL.iter_unpack(content):
        end = data.index(b"\0", strings + name_at)
        name = data[strings + name_at : end].decode()
        address = None
        if index == _UNDEFINED and name:
            address = _address_in_process(name)
        elif index in places and index < _FIRST_RESERVED:
            address = base + places[index] + value
            named[name] = address
        addresses.append(address)
    return addresses, named


def _relocate(
    memory: mmap.mmap,
    data: bytes,
    sections: list[_Section],
    places: dict[int, int],
    addresses: list[int | None],
) -> bool:
    """Write the addresses that sections ask for; False if one asks for anything else."""
    for table in sections:
        if table.kind != _RELOCATIONS or table.info not in places:
            continue
        place = places[table.info]
        content = data[table.offset : table.offset + table.size]
        for offset, kind, symbol, addend in _RELOCATION.iter_unpack(content):
            address = addresses[symbol]
            if kind != _R_X86_64_64 or address is None:
                return False
            _ADDRESS.pack_into(memory, place + offset, address + addend)
    return True


@lru_cache(maxsize=1)
def _process() -> Any:
    return ctypes.CDLL(None)


def _address_in_process(name: str) -> int | None:
    try:
        return ctypes.cast(getattr(_process(), name), ctypes.c_void_p).value
    except AttributeError:
        return None
