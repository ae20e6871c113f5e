"""The symbols that an object file expects from elsewhere: ELF, Mach-O and COFF, of 64 bits."""

from __future__ import annotations

import struct

_ELF_SYMBOLS = 2
_MACH_O_MAGIC, _MACH_O_SYMBOLS = 0xFEEDFACF, 2
_COFF_MACHINES = (0x8664, 0xAA64)


def undefined_symbols(data: bytes) -> set[str]:
    """Names as the linker sees them; on macOS each begins with an underscore.

    Sources: the System V ABI, chapter 4; Apple's <mach-o/loader.h> and <mach-o/nlist.h>; "COFF
    Symbol Table" in Microsoft's PE Format.
    """
    if data[:4] == b"\x7fELF":
        return _of_elf(data)
    if struct.unpack_from("<I", data)[0] == _MACH_O_MAGIC:
        return _of_mach_o(data)
    if struct.unpack_from("<H", data)[0] in _COFF_MACHINES:
        return _of_coff(data)
    raise ValueError(f"not an object file that is known here: {data[:8]!r}")


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _of_elf(data: bytes) -> set[str]:
    (sections_at,) = struct.unpack_from("<Q", data, 40)
    entry_size, count = struct.unpack_from("<HH", data, 58)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, sections_at + n * entry_size) for n in range(count)
    ]
    found = set()
    for _, kind, _, _, at, size, link, _, _, entry in sections:
        if kind == _ELF_SYMBOLS:
            names = sections[link][4]
            for place in range(at + entry, at + size, entry):  # The first is not a symbol.
                name, _, _, section = struct.unpack_from("<IBBH", data, place)
                if section == 0 and name:
                    found.add(_text(data, names + name))
    return found


def _of_mach_o(data: bytes) -> set[str]:
    (commands,) = struct.unpack_from("<I", data, 16)
    place, found = 32, set()
    for _ in range(commands):
        command, size = struct.unpack_from("<II", data, place)
        if command == _MACH_O_SYMBOLS:
            at, count, names, _ = struct.unpack_from("<4I", data, place + 8)
            for n in range(count):
                name, kind = struct.unpack_from("<IB", data, at + 16 * n)
                if kind & 0xE == 0 and kind & 0x1:  # N_UNDF and N_EXT
                    found.add(_text(data, names + name))
        place += size
    return found


def _of_coff(data: bytes) -> set[str]:
    at, count = struct.unpack_from("<II", data, 8)
    names, n, found = at + 18 * count, 0, set()
    while n < count:
        place = at + 18 * n
        section, _, storage, more = struct.unpack_from("<hHBB", data, place + 12)
        if section == 0 and storage == 2:  # IMAGE_SYM_UNDEFINED and IMAGE_SYM_CLASS_EXTERNAL
            zeros, offset = struct.unpack_from("<II", data, place)
            short = data[place : place + 8].rstrip(b"\0").decode() if zeros else ""
            found.add(short or _text(data, names + offset))
        n += 1 + more
    return found
