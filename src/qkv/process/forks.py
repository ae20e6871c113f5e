"""Locks that survive a fork, and whether this process is a forked one.

A child that is forked while another thread holds a lock, of LLVM or of an import, would wait for
that lock for ever. LLVM also crashes if the process ends while it compiles. So a fork, and the end
of the process, wait until no other thread compiles or imports: these hold a `ForkLock`. A
`RenewedLock` guards one object, such as a cache, and is new in the child.

A child has only the thread that forked. `is_forked` tells whether a process may have lost threads
in this way, and `on_one_torch_thread` keeps torch from waiting for those that it had started.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

P = ParamSpec("P")
R = TypeVar("R")

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


class RenewedLock:
    """A lock of one object, which its thread may take again, and which is new in a child.

    Use it as `with renewed.lock:`. The lock of the interpreter itself is entered and left in one
    step, between which and the block no signal handler runs.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _renewed_locks.add(self)

    def __reduce__(self) -> tuple[type[RenewedLock], tuple[()]]:
        """A copy of what it guards has a lock of its own."""
        return RenewedLock, ()

    def is_mine(self) -> bool:
        """Whether this thread has the lock already: a finalizer or a signal handler asks."""
        lock: Any = self.lock
        return bool(lock._is_owned())  # as threading.Condition does


_renewed_locks: WeakSet[RenewedLock] = WeakSet()


def _begin_in_child() -> None:
    global _is_fork
    _is_fork = True
    # Another thread of the parent process may have held the old ones.
    for renewed in list(_renewed_locks):
        renewed.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)


# A fork takes the last of these locks first, as does every thread that needs two of them.
compiling = ForkLock()
"""Held by a thread that compiles for another one, whose wait for it Ctrl-C may end."""
alone_in_llvm = ForkLock()
"""Held by every thread that calls llvmlite."""
importing = ForkLock()
"""Held by every thread that imports a module during a call."""
atexit.register(alone_in_llvm.take_for_good)


def _began_as_fork() -> bool:
    """Whether multiprocessing forked this process, before qkv was imported."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None or multiprocessing.parent_process() is None:
        return False
    return multiprocessing.get_start_method(allow_none=True) in (None, "fork")


_is_fork = _began_as_fork()
"""Whether this process is a fork. To ask the system for the number of the process takes longer than
to write a row."""


def is_forked() -> bool:
    """Whether this process is a fork of one that may have started threads.

    Libraries do not notice that these are gone, and would wait for them for ever.
    """
    return _is_fork


def on_one_torch_thread(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch compute on the calling thread alone in a forked child, while a function runs.

    In the child torch waits for ever for the threads that the parent had begun, as soon as it
    copies some ten thousand numbers.
    """

    @wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_fork or (torch := sys.modules.get("torch")) is None:
            return function(*args, **kwargs)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return inside
