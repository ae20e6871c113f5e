"""Threads that run a compiled job together with the caller.

A job takes its tasks from a counter, so it is complete whoever runs it, in any number: workers are
asked to join, and one that has not started when the caller is done is called off. Several callers
may be inside at once. Python's lock is free while compiled code runs.
"""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

_Job = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)

_lock = threading.Lock()
_workers: ThreadPoolExecutor | None = None
_size = 0


def run(job: int, arguments: int, threads: int) -> None:
    """Run the job at an address on at most `threads` threads, this one among them."""
    call = _Job(job)
    joined: list[Future[None]] = []
    try:
        if threads > 1:
            workers = _pool(threads - 1)
            joined = [workers.submit(call, arguments, i) for i in range(1, threads)]
        call(arguments, 0)
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
