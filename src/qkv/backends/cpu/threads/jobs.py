"""The threads of this process that compiled jobs run on: when they start, and how they end.

They start with the first job that wants more than one thread. A forked child forgets its parent's
threads and starts its own. At the end of the interpreter they are stopped and waited for; a job
that is run later runs on its caller's thread alone.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from qkv.errors import KernelBuildError
from qkv.process.forks import importing
from qkv.process.openmp import OpenMP, caller

if TYPE_CHECKING:
    from qkv.backends.cpu.compiler.compile import Kernel, Runnable
    from qkv.backends.cpu.threads.openmp import Team


class Workers(Protocol):
    """Threads that join a caller."""

    def run(self, kernel: Kernel, arguments: Runnable, workers: int) -> int:
        """Run a job with at most so many workers; the result is how many joined."""

    def stop(self) -> None:
        """End the threads; later jobs run alone."""


_lock = threading.Lock()
_workers: Workers | None = None
_teams: dict[OpenMP, Team] = {}


LONG_SECONDS = 0.15
"""Jobs that are expected to take longer run in another thread, so that Ctrl-C is answered."""
_CHECK_SECONDS = 0.05
"""How often the main thread looks for Ctrl-C meanwhile."""


def run(kernel: Kernel, arguments: Runnable, threads: int, seconds: float = 0.0) -> None:
    """Run a job on at most `threads` threads, this one among them.

    The job is done when this returns, and its memory is neither read nor written any more. Any
    number of threads may call this function. `seconds` is how long the job is expected to take.
    """
    if seconds > LONG_SECONDS and threading.current_thread() is threading.main_thread():
        _run_in_thread(kernel, arguments, threads)
    else:
        _run(kernel, arguments, threads)


def _run_in_thread(kernel: Kernel, arguments: Runnable, threads: int) -> None:
    """Run a job in another thread, so that Ctrl-C is answered in this one.

    After Ctrl-C the job goes on without anybody waiting, and keeps its memory until it is done.
    """
    errors: list[BaseException] = []

    def run_job() -> None:
        try:
            _run(kernel, arguments, threads)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run_job, name="qkv-long")
    try:
        thread.start()
    except RuntimeError:  # The system starts no more threads, or Python is ending.
        _run(kernel, arguments, threads)
        return
    while thread.is_alive():
        thread.join(_CHECK_SECONDS)
    if errors:
        raise errors[0]


def _run(kernel: Kernel, arguments: Runnable, threads: int) -> None:
    if threads == 1:
        kernel.run(arguments, 0)
        return
    if caller.openmp is not None:
        team = _teams.get(caller.openmp) or _new_team(caller.openmp)
        if team is not None and team.run(kernel, arguments, threads):
            return
    (_workers or _start_workers()).run(kernel, arguments, threads - 1)


def _start_workers() -> Workers:
    global _workers
    with _lock:
        if _workers is None:
            _workers = _new_workers()
            atexit.register(_workers.stop)
        return _workers


def _new_workers() -> Workers:
    if os.name == "posix" and sys.maxsize > 2**32:
        with importing():
            from qkv.backends.cpu.threads.pool import Pool

        # A process may give up the right to make code after its kernels are made.
        with suppress(KernelBuildError):
            return Pool()
    with importing():
        from qkv.backends.cpu.threads.python_threads import PythonThreads

    return PythonThreads()


def _new_team(functions: OpenMP) -> Team | None:
    """The team of a library; None if the code that it needs cannot be made any more."""
    with importing():
        from qkv.backends.cpu.threads.openmp import Team

    with suppress(KernelBuildError):
        return _teams.setdefault(functions, Team(functions))
    return None


def _forget_threads() -> None:
    """A forked child has none of its parent's threads, and must not touch what they share."""
    global _lock, _workers
    _lock, _workers = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
