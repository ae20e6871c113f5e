"""What the process shares, used by many threads that are switched as often as Python can.

The tables are those of prepared calls, kernels and scratch memory, and the native workers. Each
thread has its own problems and meets those of others, so that entries are made, found and thrown
out while others read them. Without a global lock the same happens at once; no interpreter of that
kind was at hand when this was written.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np
import pytest

import qkv
from qkv.backends import Prepared, register, unregister
from qkv.backends.reference import ReferenceBackend
from watched import Watched, forget_prepared_calls

THREADS, ROUNDS = 8, 12
SECONDS = 30.0
"""Seconds after which a thread that waits for another gives up."""


@pytest.fixture(autouse=True)
def switched_often(no_prepared_calls: None) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def forward(n: int) -> bytes:
    x = normal(2, 2 + n % 3, 20 + n, 8, seed=n)
    out, lse = qkv.attention(x, x, x, qkv.Causal(), qkv.Softcap(1.0 + n), return_lse=True)
    return out.tobytes() + lse.tobytes()


def decoding(n: int) -> bytes:
    query, cache = normal(1, 2, 1, 16, seed=n), normal(1, 2, 40, 16, seed=n + 100)
    found = []
    for length in range(20 + n, 28 + n):
        keys = cache[:, :, :length]
        variants = qkv.Causal(), qkv.ALiBi()
        found.append(qkv.attention(query, keys, keys, *variants, q_offset="end").tobytes())
    return b"".join(found)


def gradients(n: int) -> bytes:
    x = normal(1, 2, 17 + n, 8, seed=n)
    out, pullback = qkv.vjp(x, x, x, qkv.SlidingWindow(n, None))
    found = pullback(np.ones_like(out))
    return b"".join(g.tobytes() for g in (found.query, found.key, found.value))


def inspected(n: int) -> bytes:
    x = normal(1, 2, 11 + n, 8, seed=n)
    record = qkv.inspect(x, x, x, qkv.Causal())
    return record.entropy.tobytes() + record.top(2)[0].tobytes() + record.received.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("clearing", [False, True])
def test_every_thread_gets_what_one_alone_gets(clearing: bool, two_threads: None) -> None:
    jobs: list[tuple[Callable[[int], bytes], int]] = [
        (job, n) for job in (forward, decoding, gradients, inspected) for n in range(4)
    ]
    expected = {(job, n): job(n) for job, n in jobs}
    wrong: list[object] = []
    start = threading.Barrier(THREADS)

    def work(thread: int) -> None:
        start.wait()
        order = np.random.default_rng(thread)
        for _ in range(ROUNDS):
            for index in order.permutation(len(jobs)):
                job, n = jobs[index]
                try:
                    if job(n) != expected[job, n]:
                        wrong.append((job.__name__, n))
                except Exception as error:
                    wrong.append(error)
            if clearing and thread == 0:
                forget_prepared_calls()

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def definition(query: Any, key: Any, value: Any) -> Any:
    """Causal attention of a single head in float64, one query after the other."""
    query, key, value = (array[0, 0].astype(np.float64) for array in (query, key, value))
    rows = []
    for place, row in enumerate(query):
        scores = key[: place + 1] @ row / np.sqrt(len(row))
        weights = np.exp(scores - scores.max())
        rows.append(weights @ value[: place + 1] / weights.sum())
    return np.stack(rows)


def near_definition(length: int, dim: int, seed: int) -> None:
    arrays = [normal(1, 1, length, dim, seed=3 * seed + n) for n in range(3)]
    found = qkv.attention(*arrays, qkv.Causal())
    np.testing.assert_allclose(found[0, 0], definition(*arrays), atol=2e-6)


def at_once(work: Callable[[int], object], beside: Callable[[], object] | None = None) -> None:
    """Do the work of all threads, and something else again and again until they are done."""
    errors: list[BaseException] = []
    start, are_done = threading.Barrier(THREADS + 1), threading.Event()

    def run(thread: int) -> None:
        try:
            start.wait(SECONDS)
            if thread < THREADS:
                work(thread)
            while thread == THREADS and beside is not None and not are_done.is_set():
                beside()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS + 1)]
    for thread in threads:
        thread.start()
    for thread in threads[:-1]:
        thread.join()
    are_done.set()
    threads[-1].join()
    assert not errors, errors


@pytest.mark.slow
@pytest.mark.parametrize("beside", [None, forget_prepared_calls], ids=["alone", "registering"])
def test_calls_alike_and_unlike(beside: Callable[[], object] | None) -> None:
    """Calls of all threads have the same forms, in other orders, and each has some of its own."""

    def work(thread: int) -> None:
        order = np.random.default_rng(thread)
        for n in range(3 * ROUNDS):
            near_definition(17 + int(order.integers(6)), 4, seed=n)
            near_definition(30 + n // 3, 5 + thread, seed=n)

    at_once(work, beside)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [None, forget_prepared_calls], ids=["alone", "registering"])
def test_as_many_calls_as_are_remembered(beside: Callable[[], object] | None, watched: Any) -> None:
    """A call that one thread was about to drop had been dropped by another."""
    x = normal(1, 1, 17, 2, seed=0)
    for n in range(1030):
        for _ in range(2):
            qkv.attention(x, x, x, qkv.Causal(), scale=1.0 + n)
    assert watched.prepared("forward") == 1030

    def work(thread: int) -> None:
        for n in range(ROUNDS):
            for seed in range(3):
                near_definition(17 + n, 2 + thread, seed)

    at_once(work)
    if beside is not None:
        at_once(work, beside)


class LetsOthersIn(type(qkv.Variant)):  # type: ignore[misc]
    """Classes of variants: where a call is looked up, something else comes in between."""

    between: Callable[[], object] = staticmethod(lambda: None)

    def __hash__(cls) -> int:
        LetsOthersIn.between()
        return id(cls)


class Halved(qkv.Variant, metaclass=LetsOthersIn):
    roles: ClassVar = {}

    def lower(self, builder: Any) -> None:
        builder.mod(builder.score * 0.5)

    def naive(self, dense: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def examples(cls, shape: Any, rng: Any) -> tuple[()]:
        return ()


class Interruption:
    """Another thread forgets everything once, where a call is looked up for so many times.

    It goes on after a while, because the other thread may have to wait for it.
    """

    def __init__(self, after: int) -> None:
        self.left = after
        self.threads: list[threading.Thread] = []

    def __call__(self) -> None:
        self.left -= 1
        if self.left >= 0 or self.threads:
            return
        self.threads.append(threading.Thread(target=self.forget))
        self.threads[0].start()
        self.threads[0].join(0.1)

    def forget(self) -> None:
        forget_prepared_calls()
        near_definition(18, 4, seed=0)


def test_a_call_is_the_first_one_of_one_thread_only(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is prepared for more, even if it is made at the same time."""
    monkeypatch.setattr(LetsOthersIn, "between", lambda: threading.Event().wait(0.01))
    x = normal(1, 1, 17, 4, seed=0)
    found: list[Any] = []
    at_once(lambda _: found.append(qkv.attention(x, x, x, Halved())))
    assert 0 < watched.prepared("forward") < THREADS
    expected = qkv.attention(x, x, x, scale=0.25)
    for each in found:
        np.testing.assert_allclose(each, expected, atol=2e-6)


def test_everything_is_forgotten_while_a_call_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was prepared, and also one that gives up, because its sums overflow."""
    x, large = normal(1, 1, 17, 4, seed=0), np.full((1, 1, 17, 4), 3e38, np.float32)
    expected = qkv.attention(x, x, x, scale=0.25)
    for after in range(1000):
        forget_prepared_calls()
        interruption = Interruption(after)
        monkeypatch.setattr(LetsOthersIn, "between", interruption)
        for value, right in [(x, expected)] * 3 + [(large, large), (x, expected)]:
            np.testing.assert_allclose(qkv.attention(x, x, value, Halved()), right, rtol=1e-5)
        if not interruption.threads:
            break
        interruption.threads[0].join()
    assert 10 < after < 999


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2])
def test_everything_is_forgotten_while_an_old_call_is_dropped(
    watched: Any, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The old call is gone then. No other is interrupted where it is looked up.

    Tuples keep their hashes from Python 3.14 on, so that nothing of a variant runs there.
    """
    x = normal(1, 1, 17, 2, seed=0)
    for _ in range(2):
        qkv.attention(x, x, x, Halved())
    interruption = Interruption(after)
    monkeypatch.setattr(LetsOthersIn, "between", interruption)
    for n in range(1, 1100):
        for _ in range(2):
            qkv.attention(x, x, x, scale=float(n))
        if interruption.threads:
            break
    assert watched.prepared("forward") > 1000
    assert len(interruption.threads) == (sys.version_info < (3, 14))
    for thread in interruption.threads:
        thread.join()
    near_definition(17, 2, seed=1)


class FailsOnce(Watched):
    """The first call that it prepares fails, on the main thread at once, on others when told to;
    these are also told when to prepare another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.may_fail = threading.Event(), threading.Event()
        self.prepares, self.may_prepare = threading.Event(), threading.Event()

    def prepare(self, problem: Any, *passes: Any, **given: Any) -> Prepared | None:
        is_main, is_first = is_main_thread(), not self.prepared("forward")
        if not is_main:
            self.prepares.set()
            self.may_prepare.wait(SECONDS)
        made = super().prepare(problem, *passes, **given)
        assert made is not None

        def run(*given: Any) -> bool:
            if not is_first:
                return made.run(*given)
            if not is_main_thread():
                self.runs.set()
                self.may_fail.wait(SECONDS)
            return False

        return Prepared(run, made.results)


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def test_what_took_the_place_of_a_call_is_not_forgotten_with_it(watched: Any) -> None:
    backend = FailsOnce()
    register(backend)
    for _ in range(2):
        near_definition(17, 4, seed=0)
    other = threading.Thread(target=near_definition, args=(17, 4, 1))
    other.start()
    assert backend.runs.wait(SECONDS)
    near_definition(17, 4, seed=2)
    assert backend.prepared("forward") == 2
    backend.may_fail.set()
    assert backend.prepares.wait(SECONDS)
    computed = backend.computed
    near_definition(17, 4, seed=3)
    backend.may_prepare.set()
    other.join()
    assert backend.computed == computed + 1, "that of the other thread"


class Loud(ReferenceBackend):
    name = "loud"
    priority = 1000

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0

    def run(self, problem: Any) -> Any:
        self.computed += 1
        return super().run(problem)


class Overtaken(Watched):
    """A backend that is overtaken: while it prepares a call, a thread registers another one."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Loud()

    def prepare(self, problem: Any, *passes: Any, **given: Any) -> Prepared | None:
        def register_other() -> None:
            register(self.other)
            near_definition(18, 4, seed=1)

        thread = threading.Thread(target=register_other)
        thread.start()
        thread.join()
        return super().prepare(problem, *passes, **given)


def test_what_was_prepared_while_a_backend_came_is_not_kept(watched: Any) -> None:
    backend = Overtaken()
    register(backend)
    with ExitStack() as stack:
        stack.callback(unregister, backend.other.name)
        for seed in range(2):
            near_definition(17, 4, seed)
        assert backend.prepared("forward") == backend.other.computed == 1
        for seed in range(2, 5):
            near_definition(17, 4, seed)
        assert backend.other.computed == 4
    assert backend.computed == 2
