"""Threads that run a compiled job together with the caller.

A job takes its tasks from a counter, so it is complete whoever runs it, in any number: workers are
asked to join, and one that has not started when the caller is done is called off. Several callers
may be inside at once. Python's lock is free while compiled code runs.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkv.backends.cpu.arguments import Arguments
    from qkv.backends.cpu.compile import Kernel

_lock = threading.Lock()
_workers: ThreadPoolExecutor | None = None
_size = 0


def run(kernel: Kernel, arguments: Arguments, threads: int) -> None:
    """Run a job on at most `threads` threads, this one among them.

    The workers hold the kernel and the arguments: if Ctrl-C makes the caller leave early, what
    they still read and write stays.
    """
    joined: list[Future[None]] = []
    try:
        if threads > 1:
            workers = _pool(threads - 1)
            for i in range(1, threads):  # one by one: those before a failure must be waited for
                # One at a time: those that were submitted are waited for if the next is refused.
                joined.append(workers.submit(kernel.run, arguments, i))  # noqa: PERF401
    except RuntimeError:
        # No thread can be started, or a larger pool has just taken the place of this one.
        pass
    try:
        kernel.run(arguments, 0)
    finally:
        for future in joined:
            if not future.cancel():
                future.result()


def _pool(size: int) -> ThreadPoolExecutor:
    """Workers that stay; a larger pool takes the place of a smaller one."""
    global _workers, _size
    with _lock:
        if _workers is None or _size < size:
            if _workers is not None:
                _workers.shutdown(wait=False)
            _workers, _size = ThreadPoolExecutor(size, thread_name_prefix="qkv"), size
        return _workers


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _lock, _workers, _size
    _lock, _workers, _size = threading.Lock(), None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
