"""The way into Python that can be closed, with threads inside and threads that come late."""

import ctypes
import threading
import time

from qkv.backends.cpu.threads.gate import Gate

Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class Answer(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int64),)


class Inner(ctypes.Structure):
    _fields_ = (("other", ctypes.c_int64), ("answer", ctypes.c_void_p))


class Argument(ctypes.Structure):
    _fields_ = (("inner", ctypes.POINTER(Inner)), ("value", ctypes.c_int64))


def test_a_gate_that_is_closed_waits_for_those_inside_and_answers_the_others() -> None:
    inside, leave = threading.Event(), threading.Event()

    def python(address: int) -> int:
        inside.set()
        leave.wait(60)
        return Argument.from_address(address).value + 1

    def answer(address: int) -> int:
        return Answer.from_address(address).value

    callback, answering = Function(python), Function(answer)
    inner = Inner(0, ctypes.cast(answering, ctypes.c_void_p))
    argument = Argument(ctypes.pointer(inner), 41)
    gate = Gate(callback, (Argument.inner.offset, Inner.answer.offset))
    enter = Function(gate.address)
    results: list[int] = []
    closed = threading.Event()

    def visit() -> None:
        results.append(enter(ctypes.addressof(argument)))

    def close() -> None:
        gate.close(Answer(7))
        closed.set()

    first = threading.Thread(target=visit)
    first.start()
    assert inside.wait(60)
    closer = threading.Thread(target=close)
    closer.start()
    while not gate._words[2]:  # the answer, once it is closed
        time.sleep(1e-3)
    assert enter(ctypes.addressof(argument)) == 7
    assert not closed.is_set(), "somebody is still inside"
    leave.set()
    first.join(60)
    closer.join(60)
    assert closed.is_set()
    assert results == [42]
