"""Jobs on the threads of the caller's OpenMP library.

Between two products those threads spin for milliseconds, each on its core. A worker of our own
would have to win a core from one of them; they themselves can begin at once.
"""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from typing import TYPE_CHECKING

from qkv.backends.cpu.compiler.compile import Code, EmitFunction, build
from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.threads.layout import LAUNCH_WORDS, this_processor
from qkv.process.forks import is_forked
from qkv.process.openmp import OpenMP
from qkv.process.threads import get_num_threads

if TYPE_CHECKING:
    from qkv.backends.cpu.compiler.compile import Kernel, Runnable

_EMIT = EmitFunction("qkv.backends.cpu.threads.openmp_code", "emit_team")


class Team:
    """The threads of an OpenMP library that the calling thread belongs to."""

    def __init__(self, functions: OpenMP) -> None:
        self._functions = functions
        self._max_threads = ctypes.PYFUNCTYPE(ctypes.c_int)(functions.max_threads)
        self._launch = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_code().address("launch"))
        self._busy = threading.Lock()

    def run(self, kernel: Kernel, arguments: Runnable, threads: int) -> bool:
        """Run a job with at most so many threads; False if it has to run on others.

        The team must be no larger than the number of cores that may be used, since its end waits
        for all of its threads, and no smaller than the job wants. A forked child has none of the
        threads that the library believes in.
        """
        fits = threads <= self._max_threads() <= get_num_threads()
        if not fits or is_forked() or not self._busy.acquire(blocking=False):
            return False
        try:
            parallel, thread_num, _ = self._functions
            words = (ctypes.c_int64 * len(LAUNCH_WORDS))(
                parallel, thread_num, kernel.address, arguments.address, threads
            )
            self._launch(ctypes.addressof(words))
        finally:
            self._busy.release()
        return True


@lru_cache(maxsize=1)
def _code() -> Code:
    return build(_EMIT, (this_processor(),), host(), ("launch",))
