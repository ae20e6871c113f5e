"""The code of native workers that stay, and of the caller that they join.

A job is compiled code, `job(arguments, number)`, that takes its tasks from a counter: it is
complete whoever runs it, in any number. The caller publishes it, runs it itself as number 0, and
afterwards waits only for workers that have joined meanwhile, so that one that sleeps or is kept off
its core costs nothing.

Caller and workers share one block of memory, whose words are:

    generation   counts launches; idle workers watch it
    ticket       places left << 32 | workers inside
    busy         1 while a caller is inside; another caller then runs its job alone
    sleeping     workers that must be woken
    ended        when the last launch was over, in nanoseconds
    patience     how often a worker looks for the next launch before it sleeps
    stopped      1 at the end

A launch stores the job, then the ticket with as many places as workers are wanted, and then counts
`generation` up. A worker joins by one compare-and-swap of the ticket, which takes a place and
counts it in; the number of the place is its own for this launch, so whoever joins finds scratch
memory for it. To close, the caller clears the places that are left. The job is stored only while
nobody is inside and read only by workers that are.

Idle workers spin for a short time if the launch before this one was over not longer ago than that,
since launches that follow one another go on doing so, and then sleep: on the futex of `generation`
where Linux has it, on a condition variable elsewhere. Where launches are far apart, as the layers
of a model are, a worker that spun would only keep others off its core: it sleeps at once. A worker
that was woken too late to join spins too. Otherwise short launches that follow one another, and are
over before a worker wakes, would never be joined.

Neither a launch nor going to sleep can miss the other: the worker announces itself in `sleeping`
before the system compares `generation` once more, the caller counts `generation` up before it reads
`sleeping`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import INT32, INT64, POINTER, VOID, Emitter, Value
from qkv.backends.cpu.threads.floating_mode import adopt_floating_mode, save_floating_mode
from qkv.backends.cpu.threads.layout import FUTEX_NUMBER, MOST_WORKERS, OFFSET, Processor, Sleep

_PAUSES_TO_YIELD = 32
"""Number of pauses, about a microsecond, after which a worker yields its core. On busy machines the
system often wakes a worker on its caller's core, and a worker that only paused would keep the
caller waiting."""

_PLACE = 1 << 32
"""One place in the ticket; the bits below count the workers inside."""

_JOB = ir.FunctionType(VOID, [POINTER, INT64]).as_pointer()

_FUTEX_WAIT, _FUTEX_WAKE = 128, 129
"""Operations of the Linux futex call, for threads of one process."""


def emit_pool(processor: Processor, sleep: Sleep, clock: int) -> str:
    """The module with `worker(block)`, `run(block, job, arguments, wanted)`, `stop(block)` and
    `pauses(count)`; `clock` is the system's number of its steady clock."""
    protocol = _Protocol(processor, sleep, clock)
    protocol.emit_worker()
    protocol.emit_run()
    protocol.emit_stop()
    protocol.emit_pauses()
    return str(protocol.e.module)


class _Protocol:
    """Emits the functions of callers and workers; `block` is the address of their shared memory."""

    def __init__(self, processor: Processor, sleep: Sleep, clock: int) -> None:
        self.e = Emitter("qkv_pool", 1)
        self.processor = processor
        self.sleep = sleep
        self.clock = clock

    # Functions

    def emit_worker(self) -> None:
        """The loop of a worker thread, from its start until the pool stops."""
        e = self.e
        with e.function("worker", [POINTER], POINTER, public=True) as (_, (block,)):
            b = e.builder
            # Counting begins one launch back, so that one that is open now can be joined.
            seen = self.variable(e.sub(self.load_word(block, "generation"), 1))
            patience = self.variable(self.load_word(block, "spins"))

            def watch_generation(_: Value) -> None:
                generation = self.load_word(block, "generation")
                unchanged = b.icmp_signed("==", generation, b.load(seen))
                e.choose(unchanged, lambda: stay_idle(generation), lambda: try_to_join(generation))

            def stay_idle(generation: Value) -> None:
                awake = e.below(0, b.load(patience))
                e.choose(awake, lambda: self.relax(patience), lambda: sleep(generation))

            def sleep(generation: Value) -> None:
                self.fall_asleep(block, generation)
                # If it comes too late for the launch that woke it, it is there for the next one.
                b.store(self.load_word(block, "patience"), patience)

            def try_to_join(generation: Value) -> None:
                b.store(generation, seen)
                number = self.join(block)
                with b.if_then(e.below(0, number)):
                    adopt_floating_mode(e, self.processor, self.word_at(block, "floating"))
                    job = b.inttoptr(b.load(self.word_at(block, "job"), typ=INT64), _JOB)
                    arguments = e.pointer(b.load(self.word_at(block, "arguments"), typ=INT64))
                    b.call(job, [arguments, number])
                    b.atomic_rmw("sub", self.word_at(block, "ticket"), e.index(1), "release")
                    # Only who has joined or was woken spins for another while; others soon sleep.
                    b.store(self.load_word(block, "patience"), patience)

            def is_running() -> tuple[Value, Value]:
                return None, b.icmp_signed("==", self.load_word(block, "stopped"), e.index(0))

            e.take_while(is_running, watch_generation)
            b.ret(ir.Constant(POINTER, None))

    def emit_run(self) -> None:
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

            def launch() -> None:
                b.store(address, self.word_at(block, "job"))
                b.store(b.ptrtoint(arguments, INT64), self.word_at(block, "arguments"))
                save_floating_mode(e, self.processor, self.word_at(block, "floating"))
                self.choose_patience(block)
                ticket = self.word_at(block, "ticket")
                self.publish(e.mul(wanted, _PLACE), ticket)
                self.next_generation(block, wanted)
                b.call(job, [arguments, e.index(0)])
                left = b.atomic_rmw("and", ticket, e.index(_PLACE - 1), "acq_rel")
                b.store(e.sub(wanted, b.lshr(left, e.index(32))), joined)
                self.wait_for_all(block)
                b.store(self.now(), self.word_at(block, "ended"))
                self.publish(e.index(0), self.word_at(block, "busy"))

            taken = b.atomic_rmw("xchg", self.word_at(block, "busy"), e.index(1), "acquire")
            free = b.icmp_signed("==", taken, e.index(0))
            e.choose(free, launch, lambda: b.call(job, [arguments, e.index(0)]))
            b.ret(b.load(joined))

    def emit_stop(self) -> None:
        """Let every worker leave after what it does now."""
        e = self.e
        with e.function("stop", [POINTER], public=True) as (_, (block,)):
            self.publish(e.index(1), self.word_at(block, "stopped"))
            self.next_generation(block, e.index(MOST_WORKERS))

    def emit_pauses(self) -> None:
        """A function of many pauses, which the pool times once to know how long one takes."""
        e = self.e
        with e.function("pauses", [INT64], public=True) as (_, (count,)):
            e.loop(0, count, 1, [], lambda i, _: self.pause())

    # Steps of the protocol

    def choose_patience(self, block: Value) -> None:
        """Full if a worker that spun since the last launch would still be awake, else none."""
        e, b = self.e, self.e.builder
        gap = e.sub(self.now(), self.load_word(block, "ended"))
        follows = b.icmp_signed("<=", gap, self.load_word(block, "spin_nanoseconds"))
        patience = b.select(follows, self.load_word(block, "spins"), e.index(0))
        self.publish(patience, self.word_at(block, "patience"))

    def join(self, block: Value) -> Value:
        """Take a place; the result is its number, 0 if none is left."""
        e, b = self.e, self.e.builder
        number = self.variable(e.index(0))

        def has_place() -> tuple[Value, Value]:
            ticket = self.load_word(block, "ticket")
            places = b.lshr(ticket, e.index(32))
            outside = b.icmp_signed("==", b.load(number), e.index(0))
            return (ticket, places), b.and_(outside, e.below(0, places))

        def take_place(seen: tuple[Value, Value]) -> None:
            ticket, places = seen
            inside = e.add(ticket, 1 - _PLACE)
            swap = b.cmpxchg(self.word_at(block, "ticket"), ticket, inside, "acq_rel", "acquire")
            b.store(b.select(b.extract_value(swap, 1), places, e.index(0)), number)

        e.take_while(has_place, take_place)
        return b.load(number)

    def next_generation(self, block: Value, wanted: Value) -> None:
        """Tell the workers that something has changed, and wake some of those that sleep."""
        e, b = self.e, self.e.builder
        # `fall_asleep` too is sequentially consistent: this launch sees that a worker goes to
        # sleep, or the worker sees this launch.
        b.atomic_rmw("add", self.word_at(block, "generation"), e.index(1), "seq_cst")
        sleeping = b.load_atomic(self.word_at(block, "sleeping"), "seq_cst", 8, typ=INT64)
        count = e.least(wanted, sleeping)
        with b.if_then(e.below(0, count)):
            self.wake(block, count)

    def wait_for_all(self, block: Value) -> None:
        """Wait until no worker is inside the job."""
        e, b = self.e, self.e.builder
        turns = self.variable(e.index(0))

        def is_somebody_inside() -> tuple[Value, Value]:
            return None, b.icmp_signed("!=", self.load_word(block, "ticket"), e.index(0))

        e.take_while(is_somebody_inside, lambda _: self.relax(turns))

    def fall_asleep(self, block: Value, generation: Value) -> None:
        """Sleep while this is the generation."""
        e, b = self.e, self.e.builder
        sleeping, word = self.word_at(block, "sleeping"), self.word_at(block, "generation")
        b.atomic_rmw("add", sleeping, e.index(1), "seq_cst")
        if self.sleep == "futex":
            self.futex(word, _FUTEX_WAIT, generation)
        else:

            def is_unchanged() -> tuple[Value, Value]:
                now = b.load_atomic(word, "seq_cst", 8, typ=INT64)
                return None, b.icmp_signed("==", now, generation)

            with self.locked(block) as (mutex, condition):
                e.take_while(is_unchanged, lambda _: self.pthread("cond_wait", condition, mutex))
        b.atomic_rmw("sub", sleeping, e.index(1), "seq_cst")

    def wake(self, block: Value, count: Value) -> None:
        if self.sleep == "futex":
            self.futex(self.word_at(block, "generation"), _FUTEX_WAKE, count)
            return
        with self.locked(block) as (_, condition):
            self.e.loop(0, count, 1, [], lambda i, _: self.pthread("cond_signal", condition))

    # The system

    def futex(self, word: Value, operation: int, value: Value) -> None:
        """Call the futex of a word, of which Linux compares the low half."""
        e = self.e
        function = self.external("syscall", INT64, INT64, variadic=True)
        number = e.index(FUTEX_NUMBER[self.processor])
        forever = ir.Constant(POINTER, None)
        e.builder.call(function, [number, word, e.index(operation), value, forever])

    def now(self) -> Value:
        """Nanoseconds of a clock that only goes forward."""
        e, b = self.e, self.e.builder
        seconds = e.stack_words(2)
        function = self.external("clock_gettime", INT32, INT32, POINTER)
        b.call(function, [ir.Constant(INT32, self.clock), seconds])
        whole, rest = (e.load(e.at(seconds, WORD * i), INT64, WORD) for i in range(2))
        return e.add(e.mul(whole, 1_000_000_000), rest)

    @contextmanager
    def locked(self, block: Value) -> Iterator[tuple[Value, Value]]:
        mutex, condition = (self.e.at(block, OFFSET[name]) for name in ("mutex", "condition"))
        self.pthread("mutex_lock", mutex)
        yield mutex, condition
        self.pthread("mutex_unlock", mutex)

    def pthread(self, name: str, *args: Value) -> None:
        function = self.external(f"pthread_{name}", INT32, *[POINTER] * len(args))
        self.e.builder.call(function, args)

    def external(self, name: str, result: Any, *kinds: Any, variadic: bool = False) -> Value:
        """A function of the system, declared once."""
        kind = ir.FunctionType(result, kinds, var_arg=variadic)
        return self.e.module.declare_intrinsic(name, fnty=kind)

    # The processor

    def pause(self) -> None:
        """Pause inside a waiting loop, so that other threads of the core get on."""
        if self.processor == "x86":
            self.e.machine_intrinsic("llvm.x86.sse2.pause", VOID)
        elif self.processor == "arm":
            whole_system = ir.Constant(INT32, 15)
            self.e.machine_intrinsic("llvm.aarch64.isb", VOID, whole_system)

    # Words

    def word_at(self, block: Value, name: str) -> Value:
        """The address of a word of the block."""
        return self.e.at(block, OFFSET[name])

    def load_word(self, block: Value, name: str) -> Value:
        return self.e.builder.load_atomic(self.word_at(block, name), "acquire", 8, typ=INT64)

    def publish(self, value: Value, word: Value) -> None:
        """Write a word, and before it whatever this thread has written."""
        b = self.e.builder
        # llvmlite's atomic store asks a pointer for the type that it points to, which others of
        # its functions do not.
        typed = b.inttoptr(b.ptrtoint(word, INT64), INT64.as_pointer())
        b.store_atomic(value, typed, "release", 8)

    def variable(self, value: Value) -> Value:
        """A local variable with this first value."""
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
