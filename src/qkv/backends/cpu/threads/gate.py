"""A C function that leads into Python until it is closed.

Threads of another library call Python through ctypes, which waits for Python's lock; a call that
comes when the interpreter ends waits for ever, or brings the process down. So such a library is
given the function of a gate: it counts who is inside, and leads into Python only while it is open.
At the end it is closed, those inside are waited for, and whoever comes later gets what an answer
function of the library gives, without Python.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from llvmlite import ir

from qkv.backends.cpu.compiler.compile import EmitFunction, build
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Emitter, Value
from qkv.backends.cpu.machine.host import host

_WORDS = ("python", "inside", "answer")
"""The address of the Python callback, the number of threads inside, and, once the gate is closed,
the argument of the answer."""
_FUNCTION = ir.FunctionType(POINTER, [POINTER]).as_pointer()
_WAIT_SECONDS = 1e-3


class Gate:
    """A compiled function of one pointer, which calls Python until it is closed.

    Parameters
    ----------
    callback : ctypes function
        What is called while the gate is open.
    answer_path : tuple of int
        How the function is found that is called once the gate is closed: byte offsets, the first of
        a pointer in the argument, each further one of a pointer in what was pointed to before.
    """

    def __init__(self, callback: Any, answer_path: tuple[int, ...]) -> None:
        code = build(EmitFunction(__name__, "emit_gate"), (answer_path,), host(), ("gate", "words"))
        self.address = code.address("gate")
        at = ctypes.CFUNCTYPE(ctypes.c_int64)(code.address("words"))()
        self._words = (ctypes.c_int64 * len(_WORDS)).from_address(at)
        self._words[0] = ctypes.cast(callback, ctypes.c_void_p).value or 0
        self._process = os.getpid()
        # Other threads may still be in this code when the interpreter has deleted all objects.
        _keep_for_ever(code)
        _keep_for_ever(callback)

    def close(self, answer: ctypes.Structure) -> None:
        """Close the gate and wait for calls inside; later calls get `function(answer)`."""
        _keep_for_ever(answer)
        self._words[2] = ctypes.addressof(answer)
        # A forked child has none of the threads that its parent counted.
        while self._words[1] and os.getpid() == self._process:
            time.sleep(_WAIT_SECONDS)


def _keep_for_ever(thing: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def emit_gate(answer_path: tuple[int, ...]) -> str:
    """The module with `gate(argument)` and `words()`, the address of its words."""
    e = Emitter("qkv_gate", 1)
    words = ir.GlobalVariable(e.module, ir.ArrayType(INT64, len(_WORDS)), "state")
    words.linkage = "internal"
    words.initializer = ir.Constant(words.value_type, [0] * len(_WORDS))
    with e.function("words", [], INT64, public=True):
        e.builder.ret(e.builder.ptrtoint(words, INT64))
    with e.function("gate", [POINTER], POINTER, public=True) as (_, (argument,)):
        b = e.builder
        python, inside, answer = (
            b.gep(words, [e.index(0), e.index(n)]) for n in range(len(_WORDS))
        )
        result = e.stack_words()

        def call_function(address: Value, given: Value) -> None:
            e.store(b.call(b.inttoptr(address, _FUNCTION), [given]), result, WORD)

        def answer_without_python(given: Value) -> None:
            place = argument
            for offset in answer_path:
                place = b.load(e.at(place, offset), typ=POINTER)
            call_function(b.ptrtoint(place, INT64), b.inttoptr(given, POINTER))

        # Sequentially consistent: `close` sees this thread inside, or this thread sees that the
        # gate is closed.
        b.atomic_rmw("add", inside, e.index(1), "seq_cst")
        closed = b.load_atomic(answer, "seq_cst", 8)
        e.choose(
            b.icmp_signed("==", closed, e.index(0)),
            lambda: call_function(b.load(python), argument),
            lambda: answer_without_python(closed),
        )
        b.atomic_rmw("sub", inside, e.index(1), "release")
        b.ret(e.load(result, POINTER, WORD))
    return str(e.module)
