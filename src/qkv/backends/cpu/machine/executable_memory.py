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


def refusal() -> str:
    """What the system says to executable memory; empty where it allows it.

    A process may give up the right at any time, so this asks each time: two system calls.
    """
    return _asker()()


@lru_cache(maxsize=1)
def _asker() -> Callable[[], str]:
    """What asks for a page as LLVM does: written first, then made executable."""
    if os.name != "posix":
        return lambda: ""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    place = ctypes.addressof(ctypes.c_char.from_buffer(page))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def ask() -> str:
        refused = protect(place, len(page), mmap.PROT_READ | mmap.PROT_EXEC)
        if refused:
            return os.strerror(ctypes.get_errno())
        protect(place, len(page), mmap.PROT_READ | mmap.PROT_WRITE)
        return ""

    return ask
