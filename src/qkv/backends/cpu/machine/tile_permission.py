"""Whether the operating system lets this process use matrix tiles (AMX)."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import lru_cache

_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18


@lru_cache(maxsize=1)
def may_use_tiles() -> bool:
    """Whether the system lets this process use tiles; asked for once, and inherited by children.

    Linux refuses, for example, when some thread has a signal stack too small for the registers.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    call = ctypes.CDLL(None).syscall
    call.argtypes = [ctypes.c_long] * 3
    return int(call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)) == 0
