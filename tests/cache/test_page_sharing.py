"""Pages against a model that is a dict of lists: what sequences hold, and who holds which page."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

import qkv
from qkv.cache import PageAllocator, PagedCache

PAGE, PAGES = 3, 14


def contents(cache: PagedCache) -> list[list[float]]:
    """The tokens of each sequence, read through the page table that is handed out."""
    rows = cache.read()
    found = []
    for stored in (rows.key, rows.value):
        flat = stored.pages[stored.page_table][:, :, 0, :, 0].reshape(len(cache.lengths), -1)
        found.append([row[:n].tolist() for row, n in zip(flat, cache.lengths, strict=True)])
    keys, values = found
    assert values == [[-token for token in row] for row in keys]
    return keys


class Pages(RuleBasedStateMachine):
    """Caches on one pool, named by numbers, beside lists of the tokens that were appended."""

    caches = Bundle("caches")

    def __init__(self) -> None:
        super().__init__()
        first = PagedCache(PAGE, PAGES)
        token = np.zeros((1, 1, 1, 1))
        first.append(token, -token)  # held throughout, so that the storage is one
        self.allocator = first._pool.allocator
        self.real: dict[int, PagedCache] = {0: first}
        self.model: dict[int, list[list[float]]] = {0: [[0.0]]}
        self.next_token = 1.0

    def add(self, cache: PagedCache, sequences: list[list[float]]) -> int:
        name = max(self.real) + 1
        self.real[name], self.model[name] = cache, [list(s) for s in sequences]
        return name

    @rule(target=caches, batch=st.integers(1, 3))
    def begin(self, batch: int) -> int:
        cache = self.real[0].fork()
        cache.reorder([0] * batch)
        return self.add(cache, [[0.0]] * batch)

    @rule(name=caches, counts=st.lists(st.integers(0, 5), min_size=4, max_size=4))
    def append(self, name: int, counts: list[int]) -> None:
        cache, sequences = self.real[name], self.model[name]
        new_lens = counts[: len(sequences)]
        tokens = np.full((len(sequences), 1, max(new_lens, default=0), 1), np.nan)
        for b, count in enumerate(new_lens):
            tokens[b, 0, :count, 0] = self.next_token + np.arange(count)
            self.next_token += count
        free = cache.pages_free
        try:
            cache.append(tokens, -tokens, new_lens)
        except qkv.ShapeError:
            assert cache.pages_free == free
            most = sum(-(-n // PAGE) + 1 for n in new_lens)
            assert free < most
            return
        for b, count in enumerate(new_lens):
            sequences[b] += tokens[b, 0, :count, 0].tolist()

    @rule(target=caches, name=caches)
    def fork(self, name: int) -> int:
        return self.add(self.real[name].fork(), self.model[name])

    @rule(name=caches, indices=st.lists(st.integers(-1, 3), min_size=1, max_size=4))
    def reorder(self, name: int, indices: list[int]) -> None:
        sequences = self.model[name]
        try:
            self.real[name].reorder(indices)
        except qkv.ArgumentError:
            assert min(indices) < 0 or max(indices) >= len(sequences)
            return
        self.model[name] = [list(sequences[i]) for i in indices]

    @rule(name=caches, data=st.data())
    def truncate(self, name: int, data: Any) -> None:
        sequences = self.model[name]
        lengths = [data.draw(st.integers(-1, len(s) + 1)) for s in sequences]
        try:
            self.real[name].truncate(lengths)
        except qkv.ArgumentError:
            assert any(not 0 <= n <= len(s) for n, s in zip(lengths, sequences, strict=True))
            return
        self.model[name] = [s[:n] for n, s in zip(lengths, sequences, strict=True)]

    @rule(target=caches, name=caches, data=st.data())
    def share_a_prefix(self, name: int, data: Any) -> int:
        sequences = self.model[name]
        lengths = [data.draw(st.integers(0, len(s))) for s in sequences]
        cache = self.real[name].share(self.real[name].page_table, lengths)
        return self.add(cache, [s[:n] for n, s in zip(lengths, sequences, strict=True)])

    @rule(name=consumes(caches), collected=st.booleans())
    def free(self, name: int, collected: bool) -> None:
        cache = self.real.pop(name)
        del self.model[name]
        if collected:
            del cache
            gc.collect(0)
        else:
            cache.reset()
            cache.reset()

    @invariant()
    def tokens_are_those_of_the_model(self) -> None:
        for name, cache in self.real.items():
            assert contents(cache) == self.model[name]
            assert cache.lengths.tolist() == [len(s) for s in self.model[name]]

    @invariant()
    def every_page_is_held_as_often_as_it_is_named(self) -> None:
        named: Counter[int] = Counter()
        for name, cache in self.real.items():
            needed = [-(-len(s) // PAGE) for s in self.model[name]]
            for row, n in zip(cache.page_table, needed, strict=True):
                named.update(row[:n].tolist())
        assert self.real[0].pages_free == PAGES - len(named)
        assert [self.allocator.references(p) for p in range(PAGES)] == [
            named[p] for p in range(PAGES)
        ]
        assert self.allocator.num_free == PAGES - len(named)


Pages.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestPages = Pages.TestCase


class TestAllocator:
    def test_a_page_freed_twice(self) -> None:
        allocator = PageAllocator(4)
        pages = allocator.take(2)
        allocator.release(pages[:1])
        for wrong in (pages, pages[:1], [pages[1], pages[1]], [pages[1], 3]):
            with pytest.raises(qkv.ArgumentError, match="is freed"):
                allocator.release(wrong)
        assert (allocator.num_free, allocator.references(pages[1])) == (3, 1)

    @pytest.mark.parametrize("wrong", [4, -1, 1.5, "0", True, None])
    def test_no_such_page(self, wrong: Any) -> None:
        allocator = PageAllocator(4)
        held = allocator.take(4)
        for operation in (allocator.release, allocator.share):
            with pytest.raises(qkv.ArgumentError, match="there is no page"):
                operation([held[0], wrong])
        assert [allocator.references(page) for page in held] == [1, 1, 1, 1]

    def test_a_free_page_is_not_shared(self) -> None:
        allocator = PageAllocator(2)
        (page,) = allocator.take(1)
        with pytest.raises(qkv.ArgumentError, match="page 1 is free"):
            allocator.share([page, 1])
        assert allocator.references(page) == 1

    def test_too_few_pages(self) -> None:
        allocator = PageAllocator(3)
        allocator.take(1)
        with pytest.raises(qkv.ShapeError, match="3 pages are needed and 2 of 3 are free"):
            allocator.take(3)
        allocator.grow(4)
        assert sorted(allocator.take(3)) == [1, 2, 3]
        with pytest.raises(qkv.ArgumentError, match="num_pages"):
            allocator.grow(3)


def test_a_prompt_takes_its_memory_once() -> None:
    """A hundred requests after one prompt: its pages, and one for each that has written."""
    prompt = np.ones((1, 2, 1000, 4), np.float32)
    cache = PagedCache(page_size=16)
    cache.append(prompt, prompt)
    assert cache.pages_held == 63
    requests = [cache.fork() for _ in range(100)]
    total = cache._pool.allocator.num_pages - cache.pages_free
    assert total == 63
    token = np.ones((1, 2, 1, 4), np.float32)
    for request in requests:
        request.append(token, token)
    assert cache._pool.allocator.num_pages - cache.pages_free == 63 + 100
    del requests, request
    assert cache._pool.allocator.num_pages - cache.pages_free == 63


def test_memory_is_given_back() -> None:
    cache = PagedCache(page_size=4)
    x = np.ones((2, 1, 30, 4))
    cache.append(x, x)
    assert cache.nbytes > 0
    cache.reset()
    assert (cache.nbytes, cache.pages_held) == (0, 0)
    cache.append(x[:1, :, :, :2], x[:1, :, :, :3])  # any shapes may come next
    assert cache.lengths.tolist() == [30]


def test_the_memory_of_tensors_is_given_back() -> None:
    torch = pytest.importorskip("torch", reason="tensors, of which views are kept")
    cache = PagedCache(page_size=4)
    cache.append(torch.ones(2, 1, 30, 4), torch.ones(2, 1, 30, 4))
    held = [array.untyped_storage()._weak_ref() for array in cache._pool.storage.arrays]
    cache.reset()
    gc.collect()
    assert all(map(torch.UntypedStorage._expired, held))
