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
"""Between two looks at whether a job that was in the background is in front again."""


def is_interactive() -> bool:
    """Whether standard input is a terminal."""
    try:
        return sys.stdin is not None and sys.stdin.isatty()
    except ValueError:  # It is closed.
        return False


def on_enter(answer: Callable[[], object]) -> None:
    """Call `answer` in a thread at each Enter, until the input ends or answering fails.

    Nothing happens where standard input is no terminal. It is read by its number, because `select`
    does not see the lines that `sys.stdin` has read ahead.
    """
    if not is_interactive():
        return
    descriptor = sys.stdin.fileno()

    def follow() -> None:
        try:
            while _line_of(descriptor):
                answer()
        except (OSError, ValueError):
            # The terminal is gone, or nobody reads what is printed. The command itself goes on.
            return

    threading.Thread(target=follow, name="qkv-enter", daemon=True).start()


def _line_of(descriptor: int) -> bytes:
    """What was typed up to Enter; nothing at the end of the input."""
    if sys.platform != "win32":  # Which knows no jobs, and whose `select` takes sockets alone.
        while True:
            select.select([descriptor], [], [])
            if _is_in_front(descriptor):
                break
            # The line is meant for another job, and reading it would stop this process.
            time.sleep(_BACKGROUND_SECONDS)
    return os.read(descriptor, _BYTES)


def _is_in_front(descriptor: int) -> bool:
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # It is a terminal that controls no jobs.
        return True
