"""Native workers that stay: their threads, started without a C compiler.

What they run, and how they take jobs from a caller, is in `pool_code`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from qkv.backends.cpu.compiler.compile import Code, EmitFunction, build
from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.threads.layout import (
    BLOCK_BYTES,
    FUTEX_NUMBER,
    LINE,
    MOST_WORKERS,
    OFFSET,
    Sleep,
    this_processor,
)

if TYPE_CHECKING:
    from qkv.backends.cpu.compiler.compile import Kernel, Runnable

_EMIT = EmitFunction("qkv.backends.cpu.threads.pool_code", "emit_pool")

SPIN_SECONDS = 75e-6
"""Seconds that an idle worker watches for the next launch before it sleeps, if launches follow one
another that quickly."""


class Pool:
    """Native workers that share one block of memory; more are started as calls want them.

    Parameters
    ----------
    sleep : "futex" or "condition"
        How idle workers sleep; what the system has unless given.
    """

    def __init__(self, sleep: Sleep | None = None) -> None:
        self._code = code = _compiled_code(sleep or _sleep_method())
        self._launch = ctypes.CFUNCTYPE(
            ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64
        )(code.address("run"))
        self._stop = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address("stop"))
        self._worker = code.address("worker")
        self._memory = ctypes.create_string_buffer(BLOCK_BYTES + LINE)
        self._block = -(-ctypes.addressof(self._memory) // LINE) * LINE
        self._word("spins").value = _count_spins(code)
        self._word("spin_nanoseconds").value = round(SPIN_SECONDS * 1e9)
        if (sleep or _sleep_method()) == "condition":
            for name in ("mutex", "condition"):
                at = ctypes.c_void_p(self._block + OFFSET[name])
                getattr(_libc(), f"pthread_{name.removesuffix('ition')}_init")(at, None)
        # The system writes the handles itself: no exception in Python can lose a started thread.
        self._handles = (ctypes.c_size_t * MOST_WORKERS)()
        self._requested = 0
        self._lock = threading.Lock()
        self._process = os.getpid()

    def run(self, kernel: Kernel, arguments: Runnable, workers: int) -> int:
        """Run a job with at most so many workers; the result is how many joined."""
        if workers > self._requested:
            self._grow(workers)
        joined: int = self._launch(self._block, kernel.address, arguments.address, workers)
        return joined

    def _word(self, name: str) -> ctypes.c_int64:
        """A word of the block, to be read and written."""
        return ctypes.c_int64.from_address(self._block + OFFSET[name])

    @property
    def size(self) -> int:
        """How many workers were started."""
        return sum(map(bool, self._handles))

    def stop(self) -> None:
        """End the threads; whoever is inside finishes first. In a forked child there are none."""
        if os.getpid() != self._process:
            return  # Another thread may have held the lock when the process was forked.
        with self._lock:
            self._requested = MOST_WORKERS
            self._stop(self._block)
            for i in range(self.size):
                _libc().pthread_join(ctypes.c_size_t(self._handles[i]), None)
                self._handles[i] = 0

    def _grow(self, workers: int) -> None:
        """Start the missing workers; a system that refuses one is asked again only for more."""
        with self._lock, _signals_blocked():
            for i in range(self.size, workers):
                if not self._start(ctypes.byref(self._handles, i * ctypes.sizeof(ctypes.c_size_t))):
                    self._handles[i] = 0
                    break
            self._requested = max(self._requested, workers)

    def _start(self, handle: Any) -> bool:
        """Whether the system has started one more thread."""
        begin, block = ctypes.c_void_p(self._worker), ctypes.c_void_p(self._block)
        error: int = _libc().pthread_create(handle, None, begin, block)
        return error == 0


@lru_cache(maxsize=2)
def _compiled_code(sleep: Sleep) -> Code:
    """The compiled code, kept for good because threads are inside."""
    return build(
        _EMIT,
        (this_processor(), sleep, time.CLOCK_MONOTONIC),
        host(),
        ("run", "stop", "worker", "pauses"),
    )


def _sleep_method() -> Sleep:
    return "futex" if sys.platform == "linux" and this_processor() in FUTEX_NUMBER else "condition"


@lru_cache(maxsize=1)
def _libc() -> Any:
    return ctypes.CDLL(None)


def _count_spins(code: Code) -> int:
    """How many pauses take `SPIN_SECONDS`: processors differ by a factor of ten."""
    pauses, count = ctypes.CFUNCTYPE(None, ctypes.c_int64)(code.address("pauses")), 200
    times = []
    for _ in range(3):
        start = time.perf_counter()
        pauses(count)
        times.append(time.perf_counter() - start)
    return int(count * SPIN_SECONDS / max(min(times), 1e-7))


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A thread inherits what its creator blocks: signals are for Python's threads."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
