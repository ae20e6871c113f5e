"""A job that writes down who ran its tasks, for tests of the threads that run jobs."""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from qkv.backends.cpu.compiler import compile as cpu_compile
from qkv.backends.cpu.compiler.compile import Kernel, linked
from qkv.backends.cpu.emit.emitter import DOUBLE, INT64, POINTER, Emitter
from qkv.backends.cpu.machine.host import host

__all__ = ["KERNEL", "VISITS", "Launch"]

TASKS = 64


def emit_job() -> str:
    """`job(arguments, number)`: wait until as many have come as are `expected`, then take tasks.

    Task t writes who ran it and 2**-1074 * (t + 1), which is 0 where subnormals are flushed.
    """
    e = Emitter("job", 1)
    with e.function("job", [POINTER, INT64], public=True) as (_, (arguments, number)):
        b = e.builder

        def field(name):
            return e.at(arguments, 8 * FIELDS.index(name))

        def word(name):
            return e.load(field(name), INT64, 8)

        def store_at(name, index, value):
            e.store(value, e.at(e.pointer(word(name)), e.mul(index, 8)), 8)

        b.atomic_rmw("add", field("inside"), e.index(1), "seq_cst")
        visits = e.at(arguments, 8 * VISITS, e.mul(number, 8))
        b.atomic_rmw("add", visits, e.index(1), "seq_cst")

        def waiting():
            inside = b.load_atomic(field("inside"), "seq_cst", 8, typ=INT64)
            spent = b.atomic_rmw("add", field("waited"), e.index(1), "monotonic")
            few = e.below(inside, word("expected"))
            return None, b.and_(few, e.below(spent, word("patience")))

        give_way = ir.Function(e.module, ir.FunctionType(ir.IntType(32), []), "sched_yield")
        e.take_while(waiting, lambda _: b.call(give_way, []))

        def take():
            task = b.atomic_rmw("add", field("counter"), e.index(1), "monotonic")
            return task, e.below(task, TASKS)

        def run(task):
            store_at("ran", task, number)
            tiny = e.load(field("tiny"), DOUBLE, 8)
            store_at("results", task, b.fmul(tiny, b.sitofp(e.add(task, 1), DOUBLE)))

        e.take_while(take, run)
        b.atomic_rmw("add", field("left"), e.index(1), "seq_cst")
    return str(e.module)


FIELDS = ("inside", "expected", "waited", "counter", "tiny", "ran", "results", "left", "patience")
VISITS = 16
"""The first of the words that count how often each number was inside."""
KERNEL = Kernel(linked([cpu_compile._compile(emit_job(), host())], host(), ("job",)))


class Launch:
    """Arguments of one launch; `expected` participants are waited for before the first task, but no
    more than `patience` times."""

    def __init__(self, expected: int = 1, patience: int = 2**24) -> None:
        self.ran = np.full(TASKS, -1)
        self.results = np.full(TASKS, np.nan)
        self.words = np.zeros(VISITS + 16, np.int64)
        self.words[1] = expected
        self.words[4] = 1  # the bits of the smallest subnormal
        self.words[5:7] = self.ran.ctypes.data, self.results.ctypes.data
        self.words[8] = patience
        self.address = self.words.ctypes.data

    def check(self) -> set[int]:
        assert self.words[3] > TASKS
        assert (self.ran >= 0).all()
        expected = np.arange(1, TASKS + 1).astype(np.int64).view(np.float64)
        assert self.results.tobytes() == expected.tobytes()
        return set(self.ran.tolist())
