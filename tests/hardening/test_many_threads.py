"""What the process shares, used by many threads that are switched as often as Python can.

The tables are those of prepared calls, kernels and scratch memory, and the native workers. Each
thread has its own problems and meets those of others, so that entries are made, found and thrown
out while others read them. Without a global lock the same happens at once; no interpreter of that
kind was at hand when this was written.
"""

import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import qkv
from qkv.call.cache import CALLS, CallCache

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


def test_a_full_cache_is_emptied_by_another_thread() -> None:
    """A key that one thread was about to drop had been dropped by another."""
    cache = CallCache(capacity=2)

    class Table(dict):
        def __iter__(self) -> Iterator[object]:
            found = super().__iter__()
            thread = threading.Thread(target=cache.clear)
            thread.start()
            thread.join(timeout=0.2)
            return found

    cache._prepared = Table()
    for n in range(3):
        cache.insert((n,), n)


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
        told.append(cache.is_new(("key",)))

    threads = [threading.Thread(target=ask) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(told) == 1


def test_what_was_discarded_meanwhile_is_not_replaced() -> None:
    cache = CallCache()

    class Table(dict):
        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            thread = threading.Thread(target=cache.discard, args=(key,))
            thread.start()
            thread.join(timeout=0.2)
            threads.append(thread)
            return found

    threads: list[threading.Thread] = []
    cache._prepared = Table({("key",): 1})
    cache.replace(("key",), 2)
    for thread in threads:
        thread.join()
    assert cache.get(("key",)) is None


def test_the_least_recently_used_goes_first() -> None:
    """Against a list of keys in the order of their use."""
    cache, order = CallCache(capacity=10), list(range(10))
    for n in order:
        cache.insert((n,), n)
    for n in range(10, 200):
        used = cache.get((3,))
        assert used == 3, "it is used after every other, so it stays"
        cache.insert((n,), n)
        assert cache.get((n,)) == n
        assert len(cache) == 10
    assert not cache.replace((5,), 0)
    assert cache.replace((3,), "other")
    assert cache.get((3,)) == "other"
