"""Locks that nobody else holds when the process forks or ends.

A child that was forked while another thread held a lock, of LLVM or of an import, would wait for
it for ever, and LLVM does not survive that the process ends around it. So a fork, and the end
of the process, wait until no other thread compiles or imports.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST_WAIT = 30.0
"""Seconds that the end of the process waits for a compilation."""


class ForkLock:
    """A lock that the forking thread takes before the fork, and that is new in the child."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=lambda: self._lock.acquire(),
                after_in_parent=lambda: self._lock.release(),
                after_in_child=self._renew,
            )

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def take_for_good(self) -> None:
        """Take the lock and never release it, because the process ends."""
        self._lock.acquire(timeout=_LONGEST_WAIT)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            yield


alone_in_llvm = ForkLock()
"""Held by every thread that calls llvmlite."""
importing = ForkLock()
"""Held by every thread that imports a module during a call."""
atexit.register(alone_in_llvm.take_for_good)
