"""Whether the operating system lets this process use matrix tiles (AMX)."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from functools import lru_cache

_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18

_REASONS = {
    errno.ENOSPC: "a thread has a signal stack (sigaltstack) too small for the tile registers",
    errno.EINVAL: "this kernel is older than the permission for tiles, which came with Linux 5.16",
    errno.EOPNOTSUPP: "the kernel or the hypervisor has tiles switched off",
}
"""What the system's answers mean; the first depends on what the process did before."""


@lru_cache(maxsize=1)
def tile_refusal() -> str:
    """Why this process may not use tiles, empty if it may.

    The system is asked once, and children inherit its permission.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "tiles are used on Linux alone"
    number = _request()
    return _REASONS.get(number, os.strerror(number)) if number else ""


def may_use_tiles() -> bool:
    """Whether the system lets this process use tiles."""
    return not tile_refusal()


def _request() -> int:
    """The number of the system's error, 0 if it gives the permission."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = [ctypes.c_long] * 3
    return ctypes.get_errno() if call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) else 0
