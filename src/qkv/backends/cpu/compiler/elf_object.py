"""Machine code of ELF objects for x86-64, put into memory without LLVM.

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
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

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
_UNDEFINED = 0
_GLOBAL = 1
_R_X86_64_64 = 1


class _Section(NamedTuple):
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


class _Symbol(NamedTuple):
    name: str
    is_global: bool
    section: int
    value: int
    """Where the symbol lies in its section."""


class ElfObject:
    """Machine code in memory, which is given back when this object goes."""

    def __init__(self, memory: mmap.mmap, addresses: dict[str, int]) -> None:
        self._addresses = addresses
        # At the end of the process threads may still be in the code, so it is not given back then.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        weakref.finalize(self, memory.close).atexit = False

    def address(self, name: str) -> int:
        return self._addresses[name]


def load(objects: Sequence[bytes], names: tuple[str, ...]) -> ElfObject | None:
    """The functions of objects that call one another; None if LLVM has to link them.

    Raises
    ------
    OSError
        If the system refuses memory, or that it be executed.
    """
    files = [_read(data) for data in objects]
    known = [file for file in files if file is not None]
    if sys.platform != "linux" or len(known) < len(files):
        return None
    fixed = total = 0
    for writable in (False, True):
        for file in known:
            total = file.place(total, writable=writable)
        total = _aligned(total, mmap.PAGESIZE)
        fixed = fixed or total
    # A forked child has variables of its own.
    own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(total, mmap.PAGESIZE), own)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    public: dict[str, int] = {}
    for file in known:
        file.copy_to(memory)
        public |= file.public_symbols(base)
    are_linked = all(file.relocate(memory, base, public) for file in known)
    if not are_linked or not public.keys() >= set(names):
        return None
    executable_memory.make_executable(base, fixed)
    return ElfObject(memory, {name: public[name] for name in names})


def _read(data: bytes) -> _File | None:
    """What the object holds, if it is one of this processor."""
    if data[: len(_IDENTITY)] != _IDENTITY:
        return None
    kind, machine, start, size, count, _ = _HEADER.unpack_from(data)
    if (kind, machine, size) != (_RELOCATABLE, _X86_64, _SECTION.size):
        return None
    table = data[start : start + count * size]
    sections = [_Section(*fields) for fields in _SECTION.iter_unpack(table)]
    symbols = [section for section in sections if section.kind == _SYMBOLS]
    return _File(data, sections, symbols[0]) if len(symbols) == 1 else None


class _File:
    """An object file, and where its sections lie in memory."""

    def __init__(self, data: bytes, sections: list[_Section], symbols: _Section) -> None:
        self._data, self._sections = data, sections
        strings = sections[symbols.link].offset
        self._symbols = [
            _Symbol(self._name(strings + name), info >> 4 == _GLOBAL, section, value)
            for name, info, _, section, value, _ in _SYMBOL.iter_unpack(self._content(symbols))
        ]
        self._places: dict[int, int] = {}

    def _content(self, section: _Section) -> bytes:
        return self._data[section.offset : section.offset + section.size]

    def _name(self, start: int) -> str:
        return self._data[start : self._data.index(b"\0", start)].decode()

    def place(self, end: int, *, writable: bool) -> int:
        """Let sections that the code writes to, or all others, lie from `end` on; their end."""
        for index, section in enumerate(self._sections):
            if section.is_loaded and bool(section.flags & _WRITABLE) == writable:
                self._places[index] = end = _aligned(end, max(1, section.alignment))
                end += section.size
        return end

    def copy_to(self, memory: mmap.mmap) -> None:
        for index, place in self._places.items():
            section = self._sections[index]
            if section.kind != _NO_BITS:
                memory[place : place + section.size] = self._content(section)

    def public_symbols(self, base: int) -> dict[str, int]:
        """The addresses of what other objects may use, if the memory begins at `base`."""
        return {
            symbol.name: base + self._places[symbol.section] + symbol.value
            for symbol in self._symbols
            if symbol.is_global and symbol.section in self._places
        }

    def relocate(self, memory: mmap.mmap, base: int, public: dict[str, int]) -> bool:
        """Write the addresses that sections ask for; False if one asks for anything else."""
        for table in self._sections:
            if table.kind != _RELOCATIONS or table.info not in self._places:
                continue
            place = self._places[table.info]
            for offset, kind, number, addend in _RELOCATION.iter_unpack(self._content(table)):
                symbol, address = self._symbols[number], None
                if symbol.section == _UNDEFINED:
                    address = public.get(symbol.name) or _address_in_process(symbol.name)
                elif symbol.section in self._places:
                    address = base + self._places[symbol.section] + symbol.value
                if kind != _R_X86_64_64 or address is None:
                    return False
                _ADDRESS.pack_into(memory, place + offset, address + addend)
        return True


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


@lru_cache(maxsize=1)
def _process() -> Any:
    return ctypes.CDLL(None)


def _address_in_process(name: str) -> int | None:
    try:
        return ctypes.cast(getattr(_process(), name), ctypes.c_void_p).value if name else None
    except AttributeError:
        return None
