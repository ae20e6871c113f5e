"""Forks of one cache in threads of their own: `python -m tests.cache.forks_in_threads` runs longer.

Also what happens in the middle of a call: collections of caches, a finalizer that resets one, a
fork of the process, and two threads in one cache.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from forks_in_threads import run

import qkv
from processes import in_a_process
from qkv.cache import ContiguousCache, PageAllocator, PagedCache, RollingCache
from qkv.cache.consecutive.buffer import RowBuffer
from qkv.process.forks import RenewedLock


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_every_request_reads_its_own_tokens(dtype: str | None) -> None:
    for seed in (0, 1000):
        done = run(dtype=dtype, seed=seed)
        assert not done.wrong
        assert (done.requests, done.tokens_compared > 1000) == (48, True)


@pytest.mark.slow
def test_every_request_reads_its_own_tensors() -> None:
    torch = pytest.importorskip("torch")
    done = run(of_library=torch.from_numpy)
    assert not done.wrong
    assert done.requests == 48


def tokens(batch: int, *numbers: float) -> np.ndarray:
    return np.broadcast_to(np.array(numbers, float)[:, None], (batch, 1, len(numbers), 2)).copy()


def read(cache: PagedCache) -> list[list[float]]:
    key = cache.read().key
    flat = key.pages[key.page_table][:, :, 0, :, 0].reshape(len(cache.lengths), -1)
    return [row[:n].tolist() for row, n in zip(flat, cache.lengths, strict=True)]


def held_pages(cache: PagedCache) -> int:
    return cache._pool.allocator.num_pages - cache.pages_free


def test_one_cache_in_two_threads_is_an_error_and_costs_no_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second thread appends while the first has encoded its tokens and not yet written them."""
    prompt = PagedCache(2)
    prompt.append(tokens(1, 1, 2, 3), tokens(1, 1, 2, 3))
    cache, other = prompt.fork(), prompt.fork()
    encoded, seen = qkv.cache.pages.paged.new_tokens, []

    def while_another_appends(*arguments: Any) -> Any:
        monkeypatch.setattr(qkv.cache.pages.paged, "new_tokens", encoded)
        thread = threading.Thread(target=cache.append, args=(tokens(1, 4), tokens(1, 4)))
        thread.start()
        thread.join()
        seen.append(read(cache))
        return encoded(*arguments)

    monkeypatch.setattr(qkv.cache.pages.paged, "new_tokens", while_another_appends)
    with pytest.raises(qkv.ArgumentError, match="another thread has changed the cache"):
        cache.append(tokens(1, 9), tokens(1, 9))
    assert seen == [[[1, 2, 3, 4]]]
    assert read(cache) == [[1, 2, 3, 4]]
    assert read(other) == [[1, 2, 3]]
    assert held_pages(prompt) == 3


@pytest.mark.parametrize("make", [ContiguousCache, lambda: RollingCache(4)], ids=["grows", "rolls"])
def test_two_threads_in_one_cache_never_mix_their_rows(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]
) -> None:
    """The second thread appends while the first writes its rows."""
    cache = make()
    cache.append(tokens(1, 1, 2), tokens(1, 1, 2))
    write, threads, errors = RowBuffer.write, [], []
    is_mine, has_begun = RenewedLock.is_mine, threading.Event()

    def begun(lock: RenewedLock) -> bool:
        has_begun.set()
        return is_mine(lock)

    def append_too() -> None:
        try:
            cache.append(tokens(1, 4), tokens(1, 4))
        except qkv.ArgumentError as error:
            errors.append(str(error))

    def while_another_begins(buffer: RowBuffer, *arguments: Any) -> None:
        monkeypatch.setattr(RowBuffer, "write", write)
        monkeypatch.setattr(RenewedLock, "is_mine", begun)
        threads.append(threading.Thread(target=append_too))
        threads[0].start()
        assert has_begun.wait(60)  # It has seen the rows that there are.
        threads[0].join(0.2)  # It waits, or has written its row.
        write(buffer, *arguments)

    monkeypatch.setattr(RowBuffer, "write", while_another_begins)
    rows = cache.append(tokens(1, 9), tokens(1, 9))
    threads[0].join()
    assert rows.key[0, 0, :, 0].tolist() == [1, 2, 9]
    assert len(errors) == 1
    assert "another thread has changed the cache" in errors[0]
    assert cache.read().key[0, 0, :, 0].tolist() == [1, 2, 9]


def test_an_append_in_the_middle_of_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ContiguousCache()
    encoded, errors = qkv.cache.consecutive.buffered.new_tokens, []

    def while_a_finalizer_appends(*arguments: Any) -> Any:
        try:
            cache.append(tokens(1, 4), tokens(1, 4))
        except qkv.UnsupportedError as error:
            errors.append(str(error))
        return encoded(*arguments)

    monkeypatch.setattr(qkv.cache.consecutive.buffered, "new_tokens", while_a_finalizer_appends)
    cache.append(tokens(1, 9), tokens(1, 9))
    assert "in the middle of a call of the same thread" in errors[0]
    assert cache.read().key[0, 0, :, 0].tolist() == [9]


def test_many_threads_in_one_cache_leave_the_pages_of_others_alone() -> None:
    prompt = PagedCache(2)
    prompt.append(tokens(1, 1, 2, 3), tokens(1, 1, 2, 3))
    misused, other = prompt.fork(), prompt.fork()
    other.append(tokens(1, 7, 8, 9), tokens(1, 7, 8, 9))
    start, unexpected = threading.Barrier(6), []

    def work(thread: int) -> None:
        start.wait()
        for n in range(40):
            try:
                if n % 10 == thread:
                    misused.reset()
                elif n % 7 == thread:
                    misused.truncate(np.asarray(misused.lengths // 2))
                else:
                    misused.append(tokens(1, 5), tokens(1, 5))
            except (qkv.ArgumentError, qkv.ShapeError):
                pass
            except Exception as error:
                unexpected.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not unexpected
    assert read(other) == [[1, 2, 3, 7, 8, 9]]
    assert read(prompt) == [[1, 2, 3]]
    misused.reset()
    assert held_pages(prompt) == 2 + 2  # the first is shared; the last of `other` is a copy


def test_a_finalizer_may_reset_a_cache_in_the_middle_of_another_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = PagedCache(2)
    prompt.append(tokens(1, 1, 2, 3), tokens(1, 1, 2, 3))
    cache, ended = prompt.fork(), prompt.fork()
    ended.append(tokens(1, *range(9)), tokens(1, *range(9)))
    refused = []
    write = prompt._pool.write

    def while_one_is_collected(*arguments: Any) -> None:
        ended.reset()
        try:
            prompt.fork()
        except qkv.UnsupportedError as error:
            refused.append(str(error))
        write(*arguments)

    monkeypatch.setattr(prompt._pool, "write", while_one_is_collected)
    cache.append(tokens(1, 4, 5), tokens(1, 4, 5))
    assert "in the middle of a call of the same thread" in refused[0]
    assert read(cache) == [[1, 2, 3, 4, 5]]
    assert held_pages(prompt) == 2 + 2


def test_a_finalizer_may_release_pages_in_the_middle_of_another_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = PageAllocator(4)
    first = allocator.take(2)
    named = allocator._named

    def while_some_are_released(pages: Any) -> Any:
        monkeypatch.setattr(allocator, "_named", named)
        allocator.release(first)
        with pytest.raises(qkv.UnsupportedError, match="in the middle of another call"):
            allocator.take(1)
        return named(pages)

    monkeypatch.setattr(allocator, "_named", while_some_are_released)
    allocator.share(first)
    assert (allocator.num_free, [allocator.references(page) for page in first]) == (2, [1, 1])
    assert sorted(allocator.take(2)) == [2, 3]
    assert [allocator.references(page) for page in first] == [1, 1]


def test_rows_keep_the_pages_of_their_cache() -> None:
    """A fork of which only the rows are left, while another takes pages."""
    prompt = PagedCache(2, 8)
    prompt.append(tokens(1, 1, 2, 3), tokens(1, 1, 2, 3))
    rows = prompt.fork().append(tokens(1, 4), tokens(1, 4))
    other = prompt.fork()
    other.append(tokens(1, 7, 8, 9), tokens(1, 7, 8, 9))
    key = rows.key
    assert key.pages[key.page_table][0, :, 0, :, 0].ravel().tolist() == [1, 2, 3, 4]
    del rows
    assert held_pages(prompt) == 2 + 2


def test_a_child_process_goes_on_where_another_thread_was_in_the_middle() -> None:
    printed = in_a_process(
        """
        import os, threading
        import numpy as np, qkv.cache
        x = np.arange(6.0).reshape(1, 1, 3, 2)
        prompt = qkv.cache.PagedCache(2)
        prompt.append(x, x)
        cache, pool = prompt.fork(), prompt._pool
        inside, go_on = threading.Event(), threading.Event()
        write = pool.write
        def slow(*arguments):
            inside.set()
            go_on.wait()
            write(*arguments)
        pool.write = slow
        thread = threading.Thread(target=cache.append, args=(x, x))
        thread.start()
        inside.wait()
        child = os.fork()
        if not child:
            pool.write = write
            prompt.append(x, x)
            print(prompt.lengths, pool.allocator.num_pages - prompt.pages_free, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        go_on.set()
        thread.join()
        print(cache.lengths, pool.allocator.num_pages - prompt.pages_free)
        """
    )
    # In the child one page is shared by both, and each has another; three are new.
    assert printed.splitlines() == ["[6] 4", "[6] 4"]


@pytest.mark.slow
@pytest.mark.parametrize("make", ["Paged", "Contiguous", "Rolling", "int8"])
def test_tensors_of_a_child_process_do_not_wait_for_threads_of_torch(make: str) -> None:
    """torch's own copy of so many rows waits for ever, and an alarm ends the child."""
    pytest.importorskip("torch")
    printed = in_a_process(
        f"""
        import os, signal, torch, qkv, qkv.cache
        from qkv.cache import ContiguousCache, PagedCache, RollingCache
        makes = dict(Paged=PagedCache, Contiguous=ContiguousCache,
                     Rolling=lambda: RollingCache(700, 4), int8=lambda: PagedCache(dtype="int8"))
        torch.set_num_threads(2)
        x = torch.rand(2, 8, 300, 64)
        (x + x).sum()
        caches = [makes["{make}"]() for _ in range(2)]
        for cache in caches:
            cache.append(x, x)
        if not os.fork():
            signal.alarm(150)
            for _ in range(4):
                caches[0].append(x, x)
            caches[0].reorder([1, 1, 0])
            other = caches[0].fork()
            y = x[:1].expand(3, 8, 300, 64)
            rows = other.append(y, y)
            q = torch.ones(3, 8, 1, 64)
            print(other.lengths, torch.get_num_threads(), flush=True)
            print(rows.attention(q, q_offset="end").shape, flush=True)
            os._exit(0)
        os.wait()
        """
    )
    assert printed.splitlines() == ["[1800 1800 1800] 2", "torch.Size([3, 8, 1, 64])"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: PagedCache(2),
        lambda: PagedCache(2, dtype="int8"),
        qkv.cache.ContiguousCache,
        lambda: qkv.cache.RollingCache(4, 1),
    ],
)
def test_a_copy_is_independent(make: Any, copied: Any) -> None:
    cache = make()
    cache.append(tokens(1, 1, 2, 3), tokens(1, 1, 2, 3))
    other = copied(cache)
    x, y = tokens(1, 4), tokens(1, 5)
    query = np.ones((1, 1, 1, 2))
    mine, its = cache.append(x, x), other.append(y, y)
    for rows, last in ((mine, 4), (its, 5)):
        whole = tokens(1, 1, 2, 3, last)
        expected = qkv.attention(query, whole, whole, backend="reference")
        assert np.abs(rows.attention(query) - expected).max() < 0.05
    if isinstance(cache, PagedCache):
        assert other.pages_held == 2
        other.reset()
        assert cache.pages_held == 2
