"""One of our threads in LLVM at a time, and none while the process forks.

A child that was forked while another thread held a lock of LLVM, or of llvmlite around it, would
wait for it for ever. So a fork waits for what another thread compiles.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()


@contextmanager
def alone_in_llvm() -> Iterator[None]:
    """Whoever calls llvmlite holds this, for a query as for a compilation."""
    with _lock:
        yield


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _lock.acquire(),
        after_in_parent=lambda: _lock.release(),
        after_in_child=_new_lock,
    )
