"""Python's threads in place of native workers, where there are no POSIX threads (Windows)."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkv.backends.cpu.compiler.compile import Kernel, Runnable


class PythonThreads:
    """Workers are asked to join; one that has not started when the caller is done is called off.

    Workers hold the kernel and the arguments, so that the memory that they read and write stays
    alive if Ctrl-C makes the caller leave early.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._size = 0

    def run(self, kernel: Kernel, arguments: Runnable, workers: int) -> int:
        """Run a job with at most so many workers; the result is how many joined."""
        asked: list[Future[None]] = []
        try:
            executor = self._executor_of_size(workers)
            for number in range(1, workers + 1):
                # If one is refused, those before it are in the list, and are waited for.
                asked.append(executor.submit(kernel.run, arguments, number))  # noqa: PERF401
        except RuntimeError:
            # No thread can be started, or a larger executor has just taken the place of this one.
            pass
        joined = 0
        try:
            kernel.run(arguments, 0)
        finally:
            for future in asked:
                if not future.cancel():
                    future.result()
                    joined += 1
        return joined

    def stop(self) -> None:
        """End the threads; later jobs run alone."""
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown()

    def _executor_of_size(self, workers: int) -> ThreadPoolExecutor:
        """An executor that stays; a larger one takes the place of a smaller one."""
        with self._lock:
            if self._executor is None or self._size < workers:
                if self._executor is not None:
                    self._executor.shutdown(wait=False)
                self._executor = ThreadPoolExecutor(workers, thread_name_prefix="qkv")
                self._size = workers
            return self._executor
