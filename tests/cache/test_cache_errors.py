"""Bad input: a clear error, and the cache as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import qkv
import qkv.cache
from qkv.cache import ContiguousCache, PagedCache, RollingCache
from qkv.cache.pages import allocator, page_pool

CACHES: dict[str, Callable[..., Any]] = {
    "contiguous": ContiguousCache,
    "rolling": lambda **o: RollingCache(20, 2, **o),
    "paged": lambda **o: PagedCache(4, 12, **o),
}
RNG = np.random.default_rng(0)
KEY, VALUE = RNG.normal(size=(2, 2, 7, 8)), RNG.normal(size=(2, 2, 7, 6))


def state(cache: Any) -> list[Any]:
    """Everything that can be seen of a cache."""
    rows = cache.read()
    seen = [cache.lengths, cache.nbytes, rows.q_offset, [str(m) for m in rows.masks]]
    for stored in (rows.key, rows.value):
        arrays = (stored.pages, stored.page_table) if isinstance(stored, qkv.Paged) else (stored,)
        for array in arrays:
            quantized = isinstance(array, qkv.Quantized)
            seen += [array.values, array.scales] if quantized else [array]
    return [np.array(s) if not isinstance(s, str | list) else s for s in seen]


def same(before: list[Any], after: list[Any]) -> None:
    for one, other in zip(before, after, strict=True):
        if isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other


@pytest.fixture(params=[None, "int8"], ids=["float64", "int8"])
def dtype(request: Any) -> Any:
    return request.param


@pytest.fixture(params=CACHES)
def cache(request: Any, dtype: str | None) -> Any:
    made = CACHES[request.param](dtype=dtype)
    made.append(KEY, VALUE)
    return made


ONE, WIDE = KEY[:, :, :1], VALUE[:, :, :1]
APPENDS: dict[str, tuple[Any, Any, Any, type[Exception], str]] = {
    "batch": (ONE[:1], WIDE[:1], None, qkv.ShapeError, "key has a batch of 1, .* one of 2"),
    "batch of values": (ONE, WIDE[:1], None, qkv.ShapeError, "value has a batch of 1, .* of 2"),
    "heads": (ONE[:, :1], WIDE[:, :1], None, qkv.ShapeError, r"leading dimensions.*\(2, 1\)"),
    "heads of values": (ONE, WIDE[:, :1], None, qkv.ShapeError, "value has leading dimensions"),
    "dim": (WIDE, WIDE, None, qkv.ShapeError, "rows of 6; the cache has .* and 8"),
    "tokens": (KEY[:, :, :2], WIDE, None, qkv.ShapeError, "not rows of as many tokens"),
    "dimensions": (ONE[0], WIDE[0], None, qkv.ShapeError, "dimensions"),
    "dtype": (ONE, WIDE.astype("f"), None, qkv.DTypeError, "value has dtype float32; .* float64"),
    "integers": (ONE.astype(int), WIDE.astype(int), None, qkv.DTypeError, "dtype int64"),
    "no array": (ONE.tolist(), WIDE, None, qkv.DTypeError, "key is a list, not an array"),
    "lengths": (KEY, VALUE, [8, 1], qkv.ShapeError, "new_lens runs from 1 to 8; 7 rows"),
    "negative lengths": (KEY, VALUE, [-1, 1], qkv.ShapeError, "new_lens runs from -1 to 1"),
    "too many lengths": (KEY, VALUE, [1, 1, 1], qkv.ShapeError, r"new_lens has shape \(3,\)"),
    "fractions": (KEY, VALUE, [0.5, 1.0], qkv.DTypeError, "new_lens has dtype float64"),
}


@pytest.mark.parametrize("name", APPENDS)
def test_appends_that_do_not_fit(cache: Any, name: str) -> None:
    key, value, new_lens, error, message = APPENDS[name]
    before = state(cache)
    with pytest.raises(error, match=message):
        cache.append(key, value, new_lens)
    same(before, state(cache))


def test_another_batch_gets_the_same_words_everywhere(dtype: str | None) -> None:
    said = set()
    for make in CACHES.values():
        for truncated in (False, True):
            cache = make(dtype=dtype)
            cache.append(KEY, VALUE)
            if truncated:
                cache.truncate(0)
            with pytest.raises(qkv.ShapeError) as found:
                cache.append(ONE[:1], WIDE[:1])
            said.add(str(found.value))
    assert len(said) == 1


@pytest.mark.parametrize("lengths", [8, -1, [0, 8], [0, 0, 0], 1.5, [[1, 1]]])
def test_truncations_that_do_not_fit(cache: Any, lengths: Any) -> None:
    before = state(cache)
    with pytest.raises((qkv.ArgumentError, qkv.ShapeError, qkv.DTypeError)):
        cache.truncate(lengths)
    same(before, state(cache))


@pytest.mark.parametrize("indices", [[2], [0, -1], [[0, 1]], 0, [0.0], ["a"], [True]])
def test_orders_that_do_not_fit(cache: Any, indices: Any) -> None:
    before = state(cache)
    with pytest.raises((qkv.ArgumentError, qkv.ShapeError, qkv.DTypeError)):
        cache.reorder(indices)
    same(before, state(cache))


def test_arrays_of_another_library(cache: Any) -> None:
    torch = pytest.importorskip("torch", reason="tensors beside arrays")
    before = state(cache)
    for key, value in (
        (torch.from_numpy(ONE), torch.from_numpy(WIDE)),
        (ONE, torch.from_numpy(WIDE)),
    ):
        with pytest.raises(qkv.DTypeError, match="array of torch; the cache has arrays of numpy"):
            cache.append(key, value)
    same(before, state(cache))


@pytest.mark.parametrize("kind", CACHES)
def test_what_is_differentiated_or_traced(kind: str) -> None:
    torch = pytest.importorskip("torch", reason="gradients")
    jax = pytest.importorskip("jax", reason="traces")
    made = CACHES[kind]()
    key = torch.ones(1, 1, 1, 4, requires_grad=True)
    with pytest.raises(qkv.UnsupportedError, match="torch differentiates key"):
        made.append(key, key)

    def step(x: Any) -> Any:
        made.append(x, x)
        return x

    with pytest.raises(qkv.UnsupportedError, match="key is traced"):
        jax.jit(step)(np.ones((1, 1, 1, 4), np.float32))
    assert made.q_offset == 0
    with torch.no_grad():
        made.append(key, key)
    assert made.q_offset == 1


def test_out_of_pages() -> None:
    cache = PagedCache(page_size=4, num_pages=5)
    cache.append(KEY, VALUE)  # two pages for each of two sequences
    before = state(cache)
    with pytest.raises(qkv.ShapeError, match="2 pages are needed and 1 of 5 are free"):
        cache.append(KEY[:, :, :4], VALUE[:, :, :4])
    same(before, state(cache))
    fork = cache.fork()
    with pytest.raises(qkv.ShapeError, match="2 pages are needed and 1 of 5 are free"):
        fork.append(ONE, WIDE)  # both would write to pages that are shared
    same(before, state(cache))
    same(before, state(fork))
    fork.reset()
    cache.append(ONE, WIDE)
    assert cache.lengths.tolist() == [8, 8]


@pytest.mark.parametrize(
    ("table", "lengths", "error", "message"),
    [
        ([[0, 5]], 7, qkv.ArgumentError, "there is no page 5; there are 5 pages"),
        ([[0, -1]], 7, qkv.ArgumentError, "there is no page -1"),
        ([[0, 4]], 7, qkv.ArgumentError, "page 4 is free"),
        ([[0, 1]], 9, qkv.ShapeError, "room for 8 tokens"),
        ([[0, 1]], -1, qkv.ShapeError, "lengths run from -1"),
        ([0, 1], 7, qkv.ShapeError, "page_table has shape"),
        ([[0.0, 1.0]], 7, qkv.DTypeError, "page_table has dtype float64"),
    ],
)
def test_page_tables_out_of_range(
    table: Any, lengths: Any, error: type[Exception], message: str
) -> None:
    cache = PagedCache(page_size=4, num_pages=5)
    cache.append(KEY, VALUE)
    before, free = state(cache), cache.pages_free
    with pytest.raises(error, match=message):
        cache.share(np.array(table), lengths)
    same(before, state(cache))
    assert cache.pages_free == free


def test_a_table_is_read_as_far_as_it_is_needed() -> None:
    cache = PagedCache(page_size=4, num_pages=5)
    cache.append(KEY, VALUE)
    prefix = cache.share(np.array([[cache.page_table[0, 0], 99]]), 4)
    assert prefix.page_table.tolist() == [[cache.page_table[0, 0]]]


def test_the_most_pages_are_all_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many pages were made as there can be, and an error named them, far below the end."""
    for module in (allocator, page_pool):
        monkeypatch.setattr(module, "MOST_PAGES", 40)
    cache, row = PagedCache(1), np.ones((1, 1, 1, 2))
    cache.append(row.repeat(25, axis=2), row.repeat(25, axis=2))
    for _ in range(15):
        cache.append(row, row)
    assert (cache.lengths, cache.pages_free, cache.nbytes) == (40, 0, 40 * 2 * 2 * 8)
    before = state(cache)
    with pytest.raises(qkv.ShapeError, match=r"41 pages of page_size=1 are needed; .* at most 40"):
        cache.append(row, row)
    same(before, state(cache))


def test_no_room() -> None:
    cache = ContiguousCache(8)
    cache.append(KEY, VALUE)
    before = state(cache)
    with pytest.raises(qkv.ShapeError, match="room for 8 tokens, 7 are in it and 2 more arrive"):
        cache.append(KEY[:, :, :2], VALUE[:, :, :2])
    same(before, state(cache))
    cache.append(ONE, WIDE)


@pytest.mark.parametrize("cache", [PagedCache(page_size=4), RollingCache(3), ContiguousCache()])
def test_rows_with_masks_do_not_unpack(cache: Any) -> None:
    lengths = [7, 2] if isinstance(cache, ContiguousCache) else None
    rows = cache.append(KEY, VALUE, lengths)
    with pytest.raises(qkv.UnsupportedError, match="key and value alone do not say"):
        qkv.attention(np.ones((2, 2, 1, 4), np.float32), *rows)


def test_a_window_that_is_gone() -> None:
    cache = RollingCache(window=3)
    for i in range(7):
        cache.append(KEY[:, :, i : i + 1], VALUE[:, :, i : i + 1])
    before = state(cache)
    with pytest.raises(qkv.ArgumentError, match=r"cannot be truncated to 1 tokens.* are gone"):
        cache.truncate(1)
    same(before, state(cache))
    cache.truncate(6)  # the last append can always be taken back
    rows = cache.append(KEY[:, :, 6:], VALUE[:, :, 6:])
    np.testing.assert_array_equal(rows.key, KEY[:, :, 4:])


@pytest.mark.parametrize("kind", CACHES)
def test_an_empty_cache(kind: str) -> None:
    made = CACHES[kind]()
    assert (made.q_offset, made.nbytes) == (0, 0)
    assert isinstance(made, qkv.cache.Cache)
    with pytest.raises(qkv.ArgumentError, match="empty"):
        made.read()
    with pytest.raises(qkv.ShapeError):
        made.reorder([0])
    made.truncate(0)
    made.reset()
    rows = made.append(KEY[:, :, :0], VALUE[:, :, :0])
    out = rows.attention(KEY[:, :, :2], qkv.Causal(), q_offset="start")
    assert out.tolist() == np.zeros((2, 2, 2, 6)).tolist()


@pytest.mark.parametrize("how", ["truncated", "truncated in a fork", "begun without tokens"])
def test_sequences_without_tokens_keep_their_form(cache: Any, how: str) -> None:
    """All caches hand out their rows, of which there are none, and refuse others as before."""
    if how == "begun without tokens":
        cache.reset()
        cache.append(KEY, VALUE, new_lens=0)
    else:
        cache.truncate(0)
    held = cache.fork() if how == "truncated in a fork" else cache
    for _ in range(2):  # A fork that is collected releases pages.
        held.fork().append(KEY, VALUE)
        out = held.read().attention(KEY[:, :, :2], q_offset=0)
        assert out.tolist() == np.zeros((2, 2, 2, 6)).tolist()
        with pytest.raises(qkv.ShapeError, match=r"rows of 5; the cache has .* 8"):
            held.append(KEY[..., :5], VALUE)
        with pytest.raises(qkv.DTypeError, match="float32; the cache has float64"):
            held.append(KEY.astype(np.float32), VALUE.astype(np.float32))
    out = held.append(KEY, VALUE).attention(KEY, qkv.Causal())
    np.testing.assert_allclose(out, qkv.attention(KEY, KEY, VALUE, qkv.Causal()), atol=0.05)


def test_pages_are_given_back_by_sequences_without_tokens() -> None:
    made = PagedCache(4)
    made.append(KEY, VALUE)
    made.truncate(0)
    assert (made.nbytes, made.pages_held, made.pages_free) == (0, 0, 0)
    made.reset()
    made.append(KEY[..., :5].astype(np.float32), VALUE.astype(np.float32))
    assert made.lengths.tolist() == [7, 7]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ContiguousCache(-1),
        lambda: ContiguousCache(2.0),
        lambda: ContiguousCache(dtype="int4"),
        lambda: RollingCache(0),
        lambda: RollingCache(4, -1),
        lambda: PagedCache(0),
        lambda: PagedCache(4, -1),
        lambda: PagedCache(True),
        lambda: PagedCache(dtype=np.int8),
    ],
)
def test_impossible_caches(make: Any) -> None:
    with pytest.raises(qkv.ArgumentError):
        make()


@pytest.mark.parametrize("kind", CACHES)
def test_tensors_without_values_are_refused_where_rows_are_rounded(kind: str) -> None:
    torch = pytest.importorskip("torch", reason="tensors on meta")
    key = torch.empty(2, 2, 4, 8, device="meta")
    with pytest.raises(qkv.UnsupportedError, match="key is on meta"):
        CACHES[kind](dtype="int8").append(key, key)
