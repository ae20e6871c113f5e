"""Whether the operating system lets this process make memory that can be executed.

Some systems refuse it to some processes: Linux after `prctl(PR_SET_MDWE)`, systemd's
MemoryDenyWriteExecute, SELinux without execmem. LLVM does not see the refusal, and the first call
of its code would end the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any


def refusal() -> str:
    """What the system says to executable memory; empty where it allows it.

    A process may give up the right at any time, so this asks each time: two system calls.
    """
    return _asker()()


@lru_cache(maxsize=1)
def _asker() -> Callable[[], str]:
    """A function that asks for a page as LLVM does: written first, then made executable."""
    if os.name != "posix":
        return lambda: ""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    place = ctypes.addressof(ctypes.c_char.from_buffer(page))
    protect = _mprotect()

    def ask() -> str:
        if protect(place, len(page), mmap.PROT_READ | mmap.PROT_EXEC):
            return os.strerror(ctypes.get_errno())
        protect(place, len(page), mmap.PROT_READ | mmap.PROT_WRITE)
        return ""

    return ask


def make_executable(address: int, size: int) -> None:
    """Let whole pages that were written be executed, and no longer be written.

    Raises
    ------
    OSError
        If the system refuses it.
    """
    if _mprotect()(address, size, mmap.PROT_READ | mmap.PROT_EXEC):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@lru_cache(maxsize=1)
def _mprotect() -> Any:
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return protect
