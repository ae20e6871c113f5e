"""The threads of this process that compiled jobs run on: when they start, and how they end.

They start with the first job that wants more than one thread. A forked child forgets its parent's
and starts its own; at the end of the interpreter they are stopped and waited for, and what still
calls afterwards runs alone.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from qkv.backends.cpu.compile import Kernel, Runnable


class Workers(Protocol):
    """Threads that join a caller."""

    def run(self, kernel: Kernel, arguments: Runnable, workers: int) -> int:
        """Run a job with at most so many workers; the result is how many joined."""

    def stop(self) -> None:
        """End the threads; later jobs run alone."""


_lock = threading.Lock()
_workers: Workers | None = None


def run(kernel: Kernel, arguments: Runnable, threads: int) -> None:
    """Run a job on at most `threads` threads, this one among them.

    It has been done when this returns, and nobody reads or writes its memory any more. Callers may
    come from any number of threads.
    """
    if threads == 1:
        kernel.run(arguments, 0)
    else:
        (_workers or _start()).run(kernel, arguments, threads - 1)


def _start() -> Workers:
    global _workers
    with _lock:
        if _workers is None:
            _workers = _new_workers()
            atexit.register(_workers.stop)
        return _workers


def _new_workers() -> Workers:
    if os.name == "posix" and sys.maxsize > 2**32:
        from qkv.backends.cpu.pool import Pool

        return Pool()
    from qkv.backends.cpu.python_threads import PythonThreads

    return PythonThreads()


def _forget() -> None:
    """A forked child has none of its parent's threads, and must not touch what they share."""
    global _lock, _workers
    _lock, _workers = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
