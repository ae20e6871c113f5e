"""The OpenMP threads of the caller's library, on which compiled code may run meanwhile."""

from __future__ import annotations

import ctypes
import threading
from typing import NamedTuple

from qkv.process.threads import get_num_threads

__all__ = ["OpenMP", "caller", "num_threads_of_caller"]


class OpenMP(NamedTuple):
    """Addresses of functions of the OpenMP library that the caller's own library uses.

    Attributes
    ----------
    parallel : int
        `GOMP_parallel`, which runs a function on all threads of a team and waits for them.
    thread_num, max_threads : int
        `omp_get_thread_num` and `omp_get_max_threads`.
    """

    parallel: int
    thread_num: int
    max_threads: int


class _Caller(threading.local):
    """What compiled code should know of the caller, for each thread of Python."""

    openmp: OpenMP | None = None
    """Set while the caller's operands belong to a library whose OpenMP threads can do the work."""


caller = _Caller()


def num_threads_of_caller() -> int:
    """How many threads of Python may compute: those of `get_num_threads`, and no more than the
    caller's library takes for itself."""
    of_library = caller.openmp
    if of_library is None:
        return get_num_threads()
    return min(get_num_threads(), int(ctypes.CFUNCTYPE(ctypes.c_int)(of_library.max_threads)()))
