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
