"""Give up the right to make executable memory, for the rest of this process."""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
import struct
import sys

WAYS = ("mdwe", "seccomp", "patched")

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_PR_SET_MDWE, _REFUSE_EXEC_GAIN = 65, 1
_MPROTECT = {"x86_64": 10, "aarch64": 226}


def refuse(way: str) -> None:
    """Refuse execution in one of `WAYS`; qkv's own question is answered where the system has none.

    `mdwe` is Linux's from 6.3 on, `seccomp` what systemd does to older ones.
    """
    if way == "mdwe" and sys.platform == "linux":
        if ctypes.CDLL(None).prctl(_PR_SET_MDWE, _REFUSE_EXEC_GAIN, 0, 0, 0) == 0:
            return
        way = "seccomp"
    if way == "seccomp" and sys.platform == "linux" and platform.machine() in _MPROTECT:
        _filter_mprotect(_MPROTECT[platform.machine()])
        return
    from qkv.backends.cpu.machine import executable_memory

    executable_memory.refusal = lambda: "Permission denied"


def _filter_mprotect(number: int) -> None:
    """A filter of system calls: `mprotect` to executable memory is not permitted."""
    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
    steps = [
        (load, 0, 0, 0),  # the number of the system call
        (equal, 0, 3, number),
        (load, 0, 0, 16 + 2 * 8),  # the lower half of the third argument
        (any_bit, 0, 1, mmap.PROT_EXEC),
        (give, 0, 0, 0x00050000 | errno.EPERM),
        (give, 0, 0, 0x7FFF0000),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("H6xP", len(steps), ctypes.addressof(held)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 4]
    assert prctl(_PR_SET_NO_NEW_PRIVS, 1, None, None, None) == 0
    at = ctypes.addressof(program)
    assert prctl(_PR_SET_SECCOMP, _FILTER, at, None, None) == 0, ctypes.get_errno()
