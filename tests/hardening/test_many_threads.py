"""What the process shares, used by many threads that are switched as often as Python can.

The tables are those of prepared calls, kernels and scratch memory, and the native workers. Each
thread has its own problems and meets those of others, so that entries are made, found and thrown
out while others read them. Without a global lock the same happens at once; no interpreter of that
kind was at hand when this was written.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.backends import conditions
from qkv.call.bound import bind
from qkv.call.cache import CALLS, CallCache, Form, PreparedCall

THREADS, ROUNDS = 8, 12


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
                CALLS.clear()

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


STRUCTURE = bind(*np.zeros((3, 1, 1, 1)), ()).structure


def form_number(n: int) -> Form:
    return Form("forward", False, (n,), ())


def prepared_call(n: int) -> PreparedCall:
    return PreparedCall(form_number(n), None, "cpu", conditions())


def test_a_full_cache_is_emptied_by_another_thread() -> None:
    """A call that one thread was about to drop had been dropped by another."""
    cache = CallCache(capacity=2)

    class Table(dict):
        def items(self) -> Any:
            thread = threading.Thread(target=cache.clear)
            thread.start()
            thread.join(timeout=0.2)
            return super().items()

    cache._entries = Table()
    for n in range(4):
        cache.insert(STRUCTURE, form_number(n), prepared_call(n))
    assert cache.entry(STRUCTURE) is None or len(cache) <= 2


def test_a_key_is_new_to_one_thread_only() -> None:
    """Each thread waits for the others where the table is asked."""
    cache = CallCache()
    start = threading.Barrier(THREADS)

    class Table(dict):
        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            threading.Event().wait(0.01)  # another thread is let in between
            return found

    cache._seen = Table()
    told: list[bool] = []

    def ask() -> None:
        start.wait()
        told.append(cache.is_new(STRUCTURE, form_number(0)))

    threads = [threading.Thread(target=ask) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(told) == 1


def test_what_took_the_place_of_a_call_is_not_discarded_with_it() -> None:
    cache, before, after = CallCache(), prepared_call(0), prepared_call(0)
    cache.insert(STRUCTURE, before.form, before)
    entry = cache.entry(STRUCTURE)
    assert entry is not None
    cache.insert(STRUCTURE, after.form, after)
    cache.discard(STRUCTURE, before)
    assert entry.calls[after.form] is after
    cache.discard(STRUCTURE, after)
    assert cache.entry(STRUCTURE) is None
    cache.discard(STRUCTURE, after)


def test_the_least_recently_used_goes_first() -> None:
    """Against a list of calls in the order of their use, of two structures."""
    cache = CallCache(capacity=10)
    assert cache.entry(STRUCTURE) is None
    other = STRUCTURE._replace(variants=(True,))
    kept = prepared_call(-1)
    cache.insert(other, kept.form, kept)
    for n in range(100):
        kept.used = cache.clock
        cache.insert(STRUCTURE, form_number(n), prepared_call(n))
        entry = cache.entry(STRUCTURE)
        assert entry is not None
        assert [form.values[0] for form in entry.calls] == list(range(max(0, n - 8), n + 1))
        assert cache.entry(other) is not None, "it is used after every other, so it stays"
        assert len(cache) == min(n + 2, 10)
    cache.insert(STRUCTURE, form_number(100), prepared_call(100))
    cache.insert(STRUCTURE, form_number(101), prepared_call(101))
    cache.clock += 20
    for n in range(102, 112):
        cache.insert(STRUCTURE, form_number(n), prepared_call(n))
    assert cache.entry(other) is None


def test_what_was_prepared_under_other_conditions_is_not_kept() -> None:
    """A backend may be registered while another thread prepares."""
    cache, call = CallCache(), prepared_call(0)
    call.conditions = (-1, None)
    cache.insert(STRUCTURE, call.form, call)
    assert cache.entry(STRUCTURE) is None
