"""The pool of native workers: who joins, what runs, how it sleeps and ends. POSIX only."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

if os.name != "posix":
    pytest.skip("the pool needs POSIX threads", allow_module_level=True)

import torch
from counted_job import KERNEL, VISITS, Launch

from qkv.backends.cpu.threads.layout import LINE, OFFSET
from qkv.backends.cpu.threads.pool import Pool
from qkv.backends.cpu.threads.pool_code import emit_pool
from qkv.backends.cpu.threads.python_threads import PythonThreads

LINUX = sys.platform == "linux"
SLEEPS = ["futex", "condition"] if LINUX else ["condition"]


@pytest.fixture(params=SLEEPS)
def pool(request):
    made = Pool(request.param)
    yield made
    made.stop()


# Who joins


def test_everyone_who_is_wanted_joins_under_a_number_of_their_own(pool) -> None:
    for wanted in (1, 2, 5, 3):
        launch = Launch(expected=wanted + 1)
        assert pool.run(KERNEL, launch, wanted) == wanted
        assert launch.check() <= set(range(wanted + 1))
        assert launch.words[0] == launch.words[7] == wanted + 1, "each came and went once"
        assert launch.words[VISITS:].tolist() == [1] * (wanted + 1) + [0] * (15 - wanted)
    assert pool.size == 5


def test_no_more_join_than_are_wanted(pool) -> None:
    pool.run(KERNEL, Launch(expected=6), 5)  # all five are awake now
    for _ in range(20):
        launch = Launch(expected=3, patience=2000)  # a third has time to come, and must not
        joined = pool.run(KERNEL, launch, 1)
        assert launch.check() <= {0, 1}
        assert launch.words[VISITS:].tolist() == [1, joined] + [0] * 14
        assert joined <= 1


def test_sleeping_and_spinning_workers_hear_of_every_launch(pool) -> None:
    for pause in (0.003, 0, 0.003, 0, 1e-4):
        for _ in range(20):
            time.sleep(pause)
            assert pool.run(KERNEL, Launch(expected=3), 2) == 2


def test_a_worker_sleeps_at_once_where_launches_are_far_apart(pool) -> None:
    """A worker that took its time would spin for hours, and never be counted as asleep."""
    pool._word("spins").value = 2**50
    pool._word("spin_nanoseconds").value = 0
    launch = Launch(expected=2)
    assert pool.run(KERNEL, launch, 1) == 1
    launch.check()
    assert pool._word("patience").value == 0
    until = time.monotonic() + 20
    while not pool._word("sleeping").value and time.monotonic() < until:
        time.sleep(0.001)
    assert pool._word("sleeping").value == 1
    # The next launch wakes it, and is followed by others: now it spins.
    pool._word("spin_nanoseconds").value = 2**62
    assert pool.run(KERNEL, Launch(expected=2), 1) == 1
    assert pool._word("patience").value == 2**50
    time.sleep(0.05)
    assert pool._word("sleeping").value == 0
    assert pool.run(KERNEL, Launch(expected=2), 1) == 1


def test_a_worker_that_was_woken_too_late_is_there_for_the_next_launch(pool) -> None:
    """A worker that is there would spin for hours; else it would be counted as asleep again."""
    pool.run(KERNEL, Launch(expected=2), 1)
    for _ in range(50):
        pool._word("spins").value, pool._word("spin_nanoseconds").value = 0, 0
        pool.run(KERNEL, Launch(expected=2), 1)
        until = time.monotonic() + 20
        while not pool._word("sleeping").value and time.monotonic() < until:
            time.sleep(0.001)
        assert pool._word("sleeping").value == 1
        pool._word("spins").value, pool._word("spin_nanoseconds").value = 2**50, 2**62
        if pool.run(KERNEL, Launch(), 1) == 0:
            break
    # The launch does not wait for a worker that it has woken; it has to wake first.
    assert soon(lambda: pool._word("sleeping").value == 0)
    time.sleep(0.05)
    assert pool._word("sleeping").value == 0
    assert pool.run(KERNEL, Launch(expected=2), 1) == 1


def test_the_end_of_a_launch_is_noted_by_the_steady_clock(pool) -> None:
    before = time.monotonic_ns()
    pool.run(KERNEL, Launch(), 1)
    assert before <= pool._word("ended").value <= time.monotonic_ns()


def test_a_worker_that_is_not_wanted_costs_nothing(pool) -> None:
    launch = Launch()
    assert pool.run(KERNEL, launch, 0) == 0
    assert launch.check() == {0}
    assert pool.size == 0


# Several callers


def test_who_finds_another_caller_inside_runs_alone(pool) -> None:
    slow = Launch(expected=3)  # caller, worker, and the word of this thread
    first = threading.Thread(target=pool.run, args=(KERNEL, slow, 1))
    first.start()
    while slow.words[0] < 2:
        time.sleep(0.001)
    for _ in range(3):
        launch = Launch()
        assert pool.run(KERNEL, launch, 1) == 0
        assert launch.check() == {0}
    slow.words[0] += 1
    first.join()
    slow.check()
    assert pool.run(KERNEL, Launch(expected=2), 1) == 1, "and the place is free again"


def test_sixteen_callers(pool) -> None:
    failed = []

    def call(i: int) -> None:
        try:
            for n in range(200):
                launch = Launch()
                pool.run(KERNEL, launch, 1 + (i + n) % 4)
                launch.check()
        except AssertionError as error:
            failed.append(error)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(16)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failed
    assert pool.size == 4


# Threads of the system


def tasks() -> set[Path]:
    return set(Path("/proc/self/task").iterdir())


def soon(condition) -> bool:
    """Whether it comes true; the system takes its time to put a thread away."""
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_idle_workers_sleep_block_signals_and_end(pool) -> None:
    before = tasks()
    pool.run(KERNEL, Launch(expected=4), 3)
    workers = tasks() - before
    assert len(workers) == 3

    def state(worker: Path) -> str:
        return (worker / "stat").read_text().rpartition(")")[2].split()[0]

    assert soon(lambda: {state(worker) for worker in workers} == {"S"}), "nobody has told them to"
    for worker in workers:
        status = (worker / "status").read_text().splitlines()
        (blocked,) = (int(line.split()[1], 16) for line in status if line.startswith("SigBlk"))
        assert blocked & 0b10, "SIGINT is for Python's main thread"
    pool.stop()
    assert soon(lambda: not tasks() & workers)


def test_a_stopped_pool_runs_alone(pool) -> None:
    pool.run(KERNEL, Launch(expected=2), 1)
    pool.stop()
    pool.stop()
    launch = Launch()
    assert pool.run(KERNEL, launch, 5) == 0
    assert launch.check() == {0}
    assert pool.size == 0


def test_stopping_waits_for_who_is_inside(pool) -> None:
    slow = Launch(expected=3)
    caller = threading.Thread(target=pool.run, args=(KERNEL, slow, 1))
    caller.start()
    while slow.words[0] < 2:
        time.sleep(0.001)
    stopping = threading.Thread(target=pool.stop)
    stopping.start()
    time.sleep(0.05)
    assert stopping.is_alive()
    slow.words[0] += 1
    stopping.join(timeout=60)
    caller.join(timeout=60)
    assert not stopping.is_alive()
    slow.check()


@pytest.mark.parametrize("granted", [0, 2])
def test_a_system_that_refuses_threads(pool, granted, monkeypatch) -> None:
    asked = []

    def start(self, handle, start_=Pool._start):
        asked.append(handle)
        return len(asked) <= granted and start_(self, handle)

    monkeypatch.setattr(Pool, "_start", start)
    for _ in range(3):
        launch = Launch(expected=granted + 1)
        assert pool.run(KERNEL, launch, 4) == granted
        launch.check()
    assert pool.size == granted
    assert len(asked) == granted + 1, "asked once, not at every launch"
    pool.run(KERNEL, Launch(), 5)
    assert len(asked) == granted + 2, "and again when more are wanted"


def test_workers_flush_subnormals_when_their_caller_does(pool) -> None:
    """Otherwise bits would depend on who ran a task."""
    pool.run(KERNEL, Launch(expected=3), 2)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        flushed = Launch(expected=3)
        pool.run(KERNEL, flushed, 2)
    finally:
        torch.set_flush_denormal(False)
    assert (flushed.results == 0).all()
    kept = Launch(expected=3)
    pool.run(KERNEL, kept, 2)
    kept.check()


# Elsewhere


@pytest.mark.parametrize(
    ("triple", "processor", "sleep", "words"),
    [
        ("x86_64-unknown-linux-gnu", "x86", "futex", ("pause", "ldmxcsr", "syscall")),
        ("aarch64-unknown-linux-gnu", "arm", "futex", ("isb", "msr\tFPCR", "syscall")),
        ("arm64-apple-macosx14", "arm", "condition", ("isb", "_pthread_cond_wait")),
        ("riscv64-unknown-linux-gnu", "other", "condition", ("pthread_cond_signal",)),
    ],
)
def test_code_for_other_machines(triple, processor, sleep, words) -> None:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(emit_pool(processor, sleep, time.CLOCK_MONOTONIC))
    module.triple = triple
    module.verify()
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=2)
    assembly = machine.emit_assembly(module)
    assert all(word in assembly for word in words)


def test_words_of_different_writers_have_cache_lines_of_their_own() -> None:
    """What different sides write has a line of its own, and a mutex has room: 64 bytes on macOS."""
    apart = ("generation", "ticket", "busy", "sleeping", "job", "spins", "ended",
             "mutex", "condition")  # fmt: skip
    assert len({OFFSET[name] // LINE for name in apart}) == len(apart)


# Without POSIX threads


def test_python_threads_in_place_of_workers() -> None:
    threads = PythonThreads()
    for workers in (1, 3, 2):
        launch = Launch()
        assert 0 <= threads.run(KERNEL, launch, workers) <= workers
        assert launch.check() <= set(range(workers + 1))
    q_blocks_per_task = Launch(expected=4)
    assert threads.run(KERNEL, q_blocks_per_task, 3) == 3
    threads.stop()
    alone = Launch()
    assert threads.run(KERNEL, alone, 3) == 0
    assert alone.check() == {0}
