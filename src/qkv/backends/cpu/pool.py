"""Native workers that stay, started without a C compiler.

A job is compiled code, `job(arguments, number)`, that takes its tasks from a counter: it is
complete whoever runs it, in any number. The caller publishes it, runs it itself as number 0, and
afterwards waits only for workers that have joined meanwhile, so that one that sleeps or is kept off
its core costs nothing.

Caller and workers meet in one block of memory, whose words are:

    generation   counts launches; idle workers watch it
    ticket       places left << 32 | workers inside
    busy         1 while a caller is inside; another caller then runs its job alone
    sleeping     workers that must be woken
    stopped      1 at the end

A launch stores the job, then the ticket with as many places as workers are wanted, and then counts
`generation` up. A worker joins by one compare-and-swap of the ticket, which takes a place and
counts it in; the number of the place is its own for this launch, so whoever joins finds scratch
memory for it. To close, the caller clears the places that are left. The job is stored only while
nobody is inside and read only by workers that are.

Idle workers spin for a short time, since launches often follow one another, and then sleep: on the
futex of `generation` where Linux has it, on a condition variable elsewhere. Neither a launch nor
going to sleep can miss the other: the worker announces itself in `sleeping` before the system
compares `generation` once more, the caller counts `generation` up before it reads `sleeping`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from llvmlite import ir

from qkv.backends.cpu.compile import Code, build
from qkv.backends.cpu.host import host
from qkv.backends.cpu.ir import INT32, INT64, POINTER, VOID, Emitter, Value

if TYPE_CHECKING:
    from qkv.backends.cpu.compile import Kernel, Runnable

Sleep: TypeAlias = Literal["futex", "condition"]
Processor: TypeAlias = Literal["x86", "arm", "other"]

SPIN_SECONDS = 75e-6
"""How long an idle worker watches for the next launch before it sleeps."""

_PAUSES_TO_YIELD = 32
"""About a microsecond. Where other programs keep the cores busy, the system often wakes a worker on
its caller's core; one that only paused would then keep the caller off it for all of the spin."""

MOST_WORKERS = 4096

_LINE = 128
"""Two cache lines, which some processors fetch together: words of one line are changed together."""
_LINES = (
    ("generation", "stopped"),
    ("ticket",),
    ("busy",),
    ("sleeping",),
    ("job", "arguments", "floating"),
    ("spins",),
    ("mutex",),
    ("condition",),
)
_OFFSET = {
    name: _LINE * line + 8 * i for line, names in enumerate(_LINES) for i, name in enumerate(names)
}
_BLOCK_BYTES = _LINE * len(_LINES)

_PLACE = 1 << 32
"""One place in the ticket; what is below counts the workers inside."""

_JOB = ir.FunctionType(VOID, [POINTER, INT64]).as_pointer()

_FUTEX_NUMBER = {"x86": 202, "arm": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129
"""Within the process."""


# The code


def emit_pool(processor: Processor, sleep: Sleep) -> str:
    """The module with `worker(block)`, `run(block, job, arguments, wanted)`, `stop(block)` and
    `pauses(count)`."""
    protocol = _Protocol(processor, sleep)
    protocol.worker()
    protocol.run()
    protocol.stop()
    protocol.pauses()
    return str(protocol.e.module)


class _Protocol:
    def __init__(self, processor: Processor, sleep: Sleep) -> None:
        self.e = Emitter("qkv_pool", 1)
        self.processor = processor
        self.sleep = sleep

    # Functions

    def worker(self) -> None:
        """What a thread does from its start until the pool stops."""
        e = self.e
        with e.function("worker", [POINTER], POINTER, public=True) as (_, (block,)):
            b = e.builder
            # One launch back: whatever is open now may be joined.
            seen = self.variable(e.sub(self.read(block, "generation"), 1))
            patience = self.variable(self.read(block, "spins"))

            def watch(_: Value) -> None:
                generation = self.read(block, "generation")
                unchanged = b.icmp_signed("==", generation, b.load(seen))
                e.choose(unchanged, lambda: idle(generation), lambda: launched(generation))

            def idle(generation: Value) -> None:
                awake = e.below(0, b.load(patience))
                e.choose(
                    awake,
                    lambda: self.relax(patience),
                    lambda: self.fall_asleep(block, generation),
                )

            def launched(generation: Value) -> None:
                b.store(generation, seen)
                number = self.join(block)
                with b.if_then(e.below(0, number)):
                    self.adopt_floating_mode(block)
                    job = b.inttoptr(b.load(self.word(block, "job")), _JOB)
                    arguments = e.pointer(b.load(self.word(block, "arguments")))
                    b.call(job, [arguments, number])
                    b.atomic_rmw("sub", self.word(block, "ticket"), e.index(1), "release")
                    # Only who was needed spins again; the others sleep when their time is up.
                    b.store(self.read(block, "spins"), patience)

            def going_on() -> tuple[Value, Value]:
                return None, b.icmp_signed("==", self.read(block, "stopped"), e.index(0))

            e.take_while(going_on, watch)
            b.ret(ir.Constant(POINTER, None))

    def run(self) -> None:
        """Run a job with at most `wanted` workers; the result is how many joined."""
        e = self.e
        kinds = [POINTER, INT64, POINTER, INT64]
        with e.function("run", kinds, INT64, public=True) as (
            _,
            (block, address, arguments, wanted),
        ):
            b = e.builder
            job = b.inttoptr(address, _JOB)
            joined = self.variable(e.index(0))

            def together() -> None:
                b.store(address, self.word(block, "job"))
                b.store(b.ptrtoint(arguments, INT64), self.word(block, "arguments"))
                self.save_floating_mode(block)
                ticket = self.word(block, "ticket")
                b.store_atomic(e.mul(wanted, _PLACE), ticket, "release", 8)
                self.next_generation(block, wanted)
                b.call(job, [arguments, e.index(0)])
                left = b.atomic_rmw("and", ticket, e.index(_PLACE - 1), "acq_rel")
                b.store(e.sub(wanted, b.lshr(left, e.index(32))), joined)
                self.wait_for_all(block)
                b.store_atomic(e.index(0), self.word(block, "busy"), "release", 8)

            taken = b.atomic_rmw("xchg", self.word(block, "busy"), e.index(1), "acquire")
            free = b.icmp_signed("==", taken, e.index(0))
            e.choose(free, together, lambda: b.call(job, [arguments, e.index(0)]))
            b.ret(b.load(joined))

    def stop(self) -> None:
        """Let every worker leave after what it does now."""
        e = self.e
        with e.function("stop", [POINTER], public=True) as (_, (block,)):
            e.builder.store_atomic(e.index(1), self.word(block, "stopped"), "release", 8)
            self.next_generation(block, e.index(MOST_WORKERS))

    def pauses(self) -> None:
        """Some pauses, to be timed."""
        e = self.e
        with e.function("pauses", [INT64], public=True) as (_, (count,)):
            e.loop(0, count, 1, [], lambda i, _: self.pause())

    # Steps of the protocol

    def join(self, block: Value) -> Value:
        """Take a place; the result is its number, 0 if none is left."""
        e, b = self.e, self.e.builder
        number = self.variable(e.index(0))

        def open_() -> tuple[Value, Value]:
            ticket = self.read(block, "ticket")
            places = b.lshr(ticket, e.index(32))
            outside = b.icmp_signed("==", b.load(number), e.index(0))
            return (ticket, places), b.and_(outside, e.below(0, places))

        def attempt(seen: tuple[Value, Value]) -> None:
            ticket, places = seen
            inside = e.add(ticket, 1 - _PLACE)
            swap = b.cmpxchg(self.word(block, "ticket"), ticket, inside, "acq_rel", "acquire")
            b.store(b.select(b.extract_value(swap, 1), places, e.index(0)), number)

        e.take_while(open_, attempt)
        return b.load(number)

    def next_generation(self, block: Value, wanted: Value) -> None:
        """Tell the workers that something has changed, and wake some of those that sleep."""
        e, b = self.e, self.e.builder
        # Sequentially consistent, here and in fall_asleep: one of both sees the other.
        b.atomic_rmw("add", self.word(block, "generation"), e.index(1), "seq_cst")
        sleeping = b.load_atomic(self.word(block, "sleeping"), "seq_cst", 8)
        count = e.least(wanted, sleeping)
        with b.if_then(e.below(0, count)):
            self.wake(block, count)

    def wait_for_all(self, block: Value) -> None:
        """Until no worker is inside."""
        e, b = self.e, self.e.builder
        turns = self.variable(e.index(0))

        def somebody_inside() -> tuple[Value, Value]:
            return None, b.icmp_signed("!=", self.read(block, "ticket"), e.index(0))

        e.take_while(somebody_inside, lambda _: self.relax(turns))

    def fall_asleep(self, block: Value, generation: Value) -> None:
        """Sleep while this is the generation."""
        e, b = self.e, self.e.builder
        sleeping, word = self.word(block, "sleeping"), self.word(block, "generation")
        b.atomic_rmw("add", sleeping, e.index(1), "seq_cst")
        if self.sleep == "futex":
            self.futex(word, _FUTEX_WAIT, generation)
        else:

            def unchanged() -> tuple[Value, Value]:
                now = b.load_atomic(word, "seq_cst", 8)
                return None, b.icmp_signed("==", now, generation)

            with self.locked(block) as (mutex, condition):
                e.take_while(unchanged, lambda _: self.pthread("cond_wait", condition, mutex))
        b.atomic_rmw("sub", sleeping, e.index(1), "seq_cst")

    def wake(self, block: Value, count: Value) -> None:
        if self.sleep == "futex":
            self.futex(self.word(block, "generation"), _FUTEX_WAKE, count)
            return
        with self.locked(block) as (_, condition):
            self.e.loop(0, count, 1, [], lambda i, _: self.pthread("cond_signal", condition))

    # The system

    def futex(self, word: Value, operation: int, value: Value) -> None:
        """Linux compares the low half of the word."""
        e = self.e
        function = self.external("syscall", INT64, INT64, variadic=True)
        number = e.index(_FUTEX_NUMBER[self.processor])
        forever = ir.Constant(POINTER, None)
        e.builder.call(function, [number, word, e.index(operation), value, forever])

    @contextmanager
    def locked(self, block: Value) -> Iterator[tuple[Value, Value]]:
        mutex, condition = (self.e.at(block, _OFFSET[name]) for name in ("mutex", "condition"))
        self.pthread("mutex_lock", mutex)
        yield mutex, condition
        self.pthread("mutex_unlock", mutex)

    def pthread(self, name: str, *args: Value) -> None:
        function = self.external(f"pthread_{name}", INT32, *[POINTER] * len(args))
        self.e.builder.call(function, args)

    def external(self, name: str, result: Any, *kinds: Any, variadic: bool = False) -> Value:
        found = self.e.module.globals.get(name)
        if found is None:
            kind = ir.FunctionType(result, kinds, var_arg=variadic)
            found = ir.Function(self.e.module, kind, name)
        return found

    # The processor

    def pause(self) -> None:
        """What a loop that only waits owes to its neighbours on the core."""
        b = self.e.builder
        if self.processor == "x86":
            b.call(self.external("llvm.x86.sse2.pause", VOID), [])
        elif self.processor == "arm":
            whole_system = ir.Constant(INT32, 15)
            b.call(self.external("llvm.aarch64.isb", VOID, INT32), [whole_system])

    def save_floating_mode(self, block: Value) -> None:
        """Rounding and the flushing of subnormal numbers, as the caller has them."""
        b, mode = self.e.builder, self.word(block, "floating")
        if self.processor == "x86":
            b.call(self.external("llvm.x86.sse.stmxcsr", VOID, POINTER), [b.bitcast(mode, POINTER)])
        elif self.processor == "arm":
            b.store(b.call(self.external("llvm.aarch64.get.fpcr", INT64), []), mode)

    def adopt_floating_mode(self, block: Value) -> None:
        """Bits must not depend on which thread has computed them."""
        b, mode = self.e.builder, self.word(block, "floating")
        if self.processor == "x86":
            b.call(self.external("llvm.x86.sse.ldmxcsr", VOID, POINTER), [b.bitcast(mode, POINTER)])
        elif self.processor == "arm":
            b.call(self.external("llvm.aarch64.set.fpcr", VOID, INT64), [b.load(mode)])

    # Words

    def word(self, block: Value, name: str) -> Value:
        return self.e.builder.bitcast(self.e.at(block, _OFFSET[name]), INT64.as_pointer())

    def read(self, block: Value, name: str) -> Value:
        return self.e.builder.load_atomic(self.word(block, name), "acquire", 8)

    def variable(self, value: Value) -> Value:
        """A register that may be stored to."""
        with self.e.builder.goto_entry_block():
            slot = self.e.builder.alloca(INT64)
        self.e.builder.store(value, slot)
        return slot

    def relax(self, turns: Value) -> None:
        """Pause, count the turn down, and now and then give way to who waits for this core."""
        e, b = self.e, self.e.builder
        left = e.sub(b.load(turns), 1)
        b.store(left, turns)
        self.pause()
        due = b.icmp_signed("==", b.and_(left, e.index(_PAUSES_TO_YIELD - 1)), e.index(0))
        with b.if_then(due):
            b.call(self.external("sched_yield", INT32), [])


# The threads


class Pool:
    """Workers in one block of memory, more as they are wanted.

    Parameters
    ----------
    sleep : "futex" or "condition"
        How idle workers sleep; what the system has unless given.
    """

    def __init__(self, sleep: Sleep | None = None) -> None:
        self._code = code = _code(sleep or _sleep())
        self._launch = ctypes.CFUNCTYPE(
            ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64
        )(code.address("run"))
        self._stop = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address("stop"))
        self._worker = code.address("worker")
        self._memory = ctypes.create_string_buffer(_BLOCK_BYTES + _LINE)
        self._block = -(-ctypes.addressof(self._memory) // _LINE) * _LINE
        ctypes.c_int64.from_address(self._block + _OFFSET["spins"]).value = _spins(code)
        if (sleep or _sleep()) == "condition":
            for name in ("mutex", "condition"):
                at = ctypes.c_void_p(self._block + _OFFSET[name])
                getattr(_libc(), f"pthread_{name.removesuffix('ition')}_init")(at, None)
        # Written by the system itself: an exception between two lines of Python loses no thread.
        self._handles = (ctypes.c_size_t * MOST_WORKERS)()
        self._asked = 0
        self._lock = threading.Lock()
        self._process = os.getpid()

    def run(self, kernel: Kernel, arguments: Runnable, workers: int) -> int:
        """Run a job with at most so many workers; the result is how many joined."""
        if workers > self._asked:
            self._grow(workers)
        joined: int = self._launch(self._block, kernel.address, arguments.address, workers)
        return joined

    @property
    def size(self) -> int:
        """Workers that were started."""
        return sum(map(bool, self._handles))

    def stop(self) -> None:
        """End the threads; whoever is inside finishes first. In a forked child there are none."""
        with self._lock:
            self._asked = MOST_WORKERS
            if os.getpid() != self._process:
                return
            self._stop(self._block)
            for i in range(self.size):
                _libc().pthread_join(ctypes.c_size_t(self._handles[i]), None)
                self._handles[i] = 0

    def _grow(self, workers: int) -> None:
        """Start what is missing; a system that refuses is asked again only for more."""
        with self._lock, _signals_blocked():
            for i in range(self.size, workers):
                if not self._start(ctypes.byref(self._handles, i * ctypes.sizeof(ctypes.c_size_t))):
                    self._handles[i] = 0
                    break
            self._asked = max(self._asked, workers)

    def _start(self, handle: Any) -> bool:
        """Whether the system has started one more thread."""
        begin, block = ctypes.c_void_p(self._worker), ctypes.c_void_p(self._block)
        error: int = _libc().pthread_create(handle, None, begin, block)
        return error == 0


@lru_cache(maxsize=2)
def _code(sleep: Sleep) -> Code:
    """Kept for good: threads are inside."""
    return build(emit_pool, (_processor(), sleep), host(), ("run", "stop", "worker", "pauses"))


def _processor() -> Processor:
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return "x86"
    return "arm" if machine in ("arm64", "aarch64") else "other"


def _sleep() -> Sleep:
    return "futex" if sys.platform == "linux" and _processor() in _FUTEX_NUMBER else "condition"


@lru_cache(maxsize=1)
def _libc() -> Any:
    return ctypes.CDLL(None)


def _spins(code: Code) -> int:
    """Pauses in `SPIN_SECONDS`: processors differ by a factor of ten."""
    pauses, count = ctypes.CFUNCTYPE(None, ctypes.c_int64)(code.address("pauses")), 200
    times = []
    for _ in range(3):
        start = time.perf_counter()
        pauses(count)
        times.append(time.perf_counter() - start)
    return int(count * SPIN_SECONDS / max(min(times), 1e-7))


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A thread inherits what its creator blocks: signals are for Python's threads."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
