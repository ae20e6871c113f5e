"""What a running command does when Enter is pressed in its terminal."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable

__all__ = ["is_interactive", "on_enter"]

_BYTES = 4096
_BACKGROUND_SECONDS = 1.0
"""Seconds between two checks of whether this job is in the foreground again."""
_KEY_SECONDS = 0.1
"""Seconds between two checks of the Windows console for a key."""
_CTRL_Z = "\x1a"
"""The key that ends the input there."""


def is_interactive() -> bool:
    """Whether standard input is a terminal."""
    try:
        return sys.stdin is not None and sys.stdin.isatty() and _is_console(sys.stdin.fileno())
    except (OSError, ValueError):  # It is closed, or has no descriptor.
        return False


def _is_console(descriptor: int) -> bool:
    """Whether it is a console: on Windows `isatty` is true of NUL as well."""
    if sys.platform != "win32":
        return True
    import ctypes
    import msvcrt

    mode = ctypes.c_ulong()
    handle = ctypes.c_void_p(msvcrt.get_osfhandle(descriptor))
    return bool(ctypes.windll.kernel32.GetConsoleMode(handle, ctypes.byref(mode)))


def on_enter(answer: Callable[[], object]) -> None:
    """Call `answer` in a thread at each Enter, until the input ends or answering fails.

    Nothing happens where standard input is not a terminal. Its file descriptor is read, because
    `select` does not see the lines that `sys.stdin` has read ahead. On Windows keys are taken one
    by one.
    """
    if not is_interactive():
        return
    descriptor = sys.stdin.fileno()

    def follow() -> None:
        try:
            while _is_entered(descriptor):
                answer()
        except (OSError, ValueError):
            # The terminal is gone, or nobody reads what is printed. The command itself goes on.
            return

    threading.Thread(target=follow, name="qkv-enter", daemon=True).start()


def _is_entered(descriptor: int) -> bool:
    """Wait for Enter; whether it came before the end of the input."""
    if sys.platform == "win32":
        # `select` takes sockets alone there, and a read of the console cannot be cancelled.
        import msvcrt

        while True:
            if not msvcrt.kbhit():
                time.sleep(_KEY_SECONDS)
            elif (key := msvcrt.getwch()) in ("\r", _CTRL_Z):
                return key == "\r"
    while True:
        select.select([descriptor], [], [])
        if _is_in_front(descriptor):
            return bool(os.read(descriptor, _BYTES))
        # The line is meant for another job, and reading it would stop this process.
        time.sleep(_BACKGROUND_SECONDS)


def _is_in_front(descriptor: int) -> bool:
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # This terminal has no job control.
        return True
