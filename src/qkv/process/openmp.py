"""The OpenMP threads of the caller's library, on which compiled code may run meanwhile."""

from __future__ import annotations

import threading
from typing import NamedTuple

__all__ = ["OpenMP", "caller"]


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
