"""Jobs on the threads of the caller's OpenMP library.

Between two products those threads spin for milliseconds, each on its core. A worker of our own
would have to win a core from one of them; they themselves can begin at once.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import lru_cache
from typing import TYPE_CHECKING

from llvmlite import ir

from qkv._threads import OpenMP, get_num_threads
from qkv.backends.cpu.compiler.compile import Code, build
from qkv.backends.cpu.emit.emitter import INT32, INT64, POINTER, VOID, Emitter, Value
from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.threads.floating_mode import (
    Processor,
    adopt_floating_mode,
    save_floating_mode,
    this_processor,
)

if TYPE_CHECKING:
    from qkv.backends.cpu.compiler.compile import Kernel, Runnable

_WORDS = ("parallel", "thread_num", "job", "arguments", "threads", "floating")
_OFFSET = {name: 8 * i for i, name in enumerate(_WORDS)}
_LAUNCH = ir.FunctionType(VOID, [POINTER, POINTER, INT32, INT32]).as_pointer()
_NUMBER = ir.FunctionType(INT32, []).as_pointer()
_JOB = ir.FunctionType(VOID, [POINTER, INT64]).as_pointer()


class Team:
    """The threads of an OpenMP library that the calling thread belongs to."""

    def __init__(self, functions: OpenMP) -> None:
        self._functions = functions
        self._max_threads = ctypes.PYFUNCTYPE(ctypes.c_int)(functions.max_threads)
        self._launch = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_code().address("launch"))
        self._busy = threading.Lock()
        self._process = os.getpid()

    def run(self, kernel: Kernel, arguments: Runnable, threads: int) -> bool:
        """Run a job with at most so many threads; False if it has to run on others.

        The team must be no larger than the number of cores that may be used, since its end waits
        for all of its threads, and no smaller than the job wants. A forked child has none of the
        threads that the library believes in.
        """
        fits = threads <= self._max_threads() <= get_num_threads()
        if not fits or os.getpid() != self._process or not self._busy.acquire(blocking=False):
            return False
        try:
            parallel, thread_num, _ = self._functions
            words = (ctypes.c_int64 * len(_WORDS))(
                parallel, thread_num, kernel.address, arguments.address, threads
            )
            self._launch(ctypes.addressof(words))
        finally:
            self._busy.release()
        return True


@lru_cache(maxsize=4)
def team_of(functions: OpenMP) -> Team:
    """The team of a library."""
    return Team(functions)


@lru_cache(maxsize=1)
def _code() -> Code:
    return build(emit_team, (this_processor(),), host(), ("launch",))


def emit_team(processor: Processor) -> str:
    """The module with `launch(words)`, which runs a job on a team.

    The team has as many threads as the library takes by itself. If it were asked for fewer, it
    would end the others, and start new ones for the caller's next product.
    """
    e = Emitter("qkv_openmp", 1)

    def word(words: Value, name: str) -> Value:
        return e.builder.bitcast(e.at(words, _OFFSET[name]), INT64.as_pointer())

    def function(words: Value, name: str, kind: ir.PointerType) -> Value:
        return e.builder.inttoptr(e.builder.load(word(words, name)), kind)

    with e.function("member", [POINTER]) as (member, (words,)):
        b = e.builder
        number = b.zext(b.call(function(words, "thread_num", _NUMBER), []), INT64)
        with b.if_then(e.below(number, b.load(word(words, "threads")))):
            own = b.alloca(INT64)
            save_floating_mode(e, processor, own)
            adopt_floating_mode(e, processor, word(words, "floating"))
            arguments = e.pointer(b.load(word(words, "arguments")))
            b.call(function(words, "job", _JOB), [arguments, number])
            adopt_floating_mode(e, processor, own)
    with e.function("launch", [POINTER], public=True) as (_, (words,)):
        b = e.builder
        save_floating_mode(e, processor, word(words, "floating"))
        by_default = ir.Constant(INT32, 0)
        launch = function(words, "parallel", _LAUNCH)
        b.call(launch, [b.bitcast(member, POINTER), words, by_default, by_default])
    return str(e.module)
