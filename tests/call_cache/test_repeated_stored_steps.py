"""Steps over caches of all kinds are prepared from the step before, and checked anew."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

import qkv
import qkv.cache
from qkv.errors import ShapeError
from watched import forget_prepared_calls, python_calls

CACHES = {
    "int8": lambda: qkv.cache.ContiguousCache(dtype="int8"),
    "pages": lambda: qkv.cache.PagedCache(page_size=4),
    "int8 pages": lambda: qkv.cache.PagedCache(page_size=4, dtype="int8"),
    "arrays": lambda: qkv.cache.ContiguousCache(),
    "rolling": lambda: qkv.cache.RollingCache(8),
    "rolling int8": lambda: qkv.cache.RollingCache(8, dtype="int8"),
}
MASKS = {
    "nothing": ((), lambda back: back >= -math.inf),
    "causal": ((qkv.Causal(),), lambda back: back >= 0),
    "window": ((qkv.SlidingWindow(7, 0),), lambda back: (back >= 0) & (back <= 7)),
}
BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 24

pytestmark = pytest.mark.usefixtures("no_prepared_calls")


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def rows_of(stored, batch: int) -> np.ndarray:
    """The rows of one batch row in float64, gathered one by one."""
    stored = as_arrays(stored)
    scales = offset = None
    if isinstance(stored, qkv.Paged):
        pages, table = stored.pages, stored.page_table[batch]
        if isinstance(pages, qkv.Quantized):
            pages, scales, offset = pages.values, pages.scales, pages.offset
            scales = np.concatenate([scales[page] for page in table], axis=1)
        values = np.concatenate([pages[page] for page in table], axis=1)
    elif isinstance(stored, qkv.Quantized):
        values, scales, offset = stored.values[batch], stored.scales[batch], stored.offset
    else:
        values = stored[batch]
    with np.errstate(all="ignore"):  # Behind the last token there may be anything.
        rows = values.astype(np.float64)
        if scales is not None:
            rows = rows * scales[..., None]
    return rows if offset is None else rows + offset[:, None]


def as_arrays(stored):
    """The same of NumPy arrays."""
    if isinstance(stored, qkv.Paged):
        return qkv.Paged(as_arrays(stored.pages), stored.page_table)
    if isinstance(stored, qkv.Quantized):
        offset = None if stored.offset is None else np.asarray(stored.offset)
        return qkv.Quantized(np.asarray(stored.values), np.asarray(stored.scales), offset)
    if isinstance(stored, torch.Tensor) and stored.dtype is torch.bfloat16:
        stored = stored.float()
    return np.asarray(stored)


def defined(query, rows, allowed) -> np.ndarray:
    """softmax(QK^T / sqrt(d)) V in float64, query by query."""
    out = np.zeros(query.shape)
    (part,) = rows.parts
    lengths = [mask.kv_lens for mask in part.masks if isinstance(mask, qkv.KeyLengths)]
    first = np.broadcast_to(rows.q_offset - part.kv_offset, BATCH)
    for b in range(BATCH):
        key, value = rows_of(part.key, b), rows_of(part.value, b)
        length = np.broadcast_to(lengths[0], BATCH)[b] if lengths else key.shape[1]
        for h in range(HEADS):
            kv_head = h * KV_HEADS // HEADS
            for i in range(query.shape[2]):
                back = first[b] + i - np.arange(length)
                scores = key[kv_head, :length] @ query[b, h, i].astype(np.float64) / math.sqrt(DIM)
                seen = allowed(back) & (back < (rows.window or math.inf))
                weights = np.where(seen, np.exp(scores - scores.max()), 0)
                out[b, h, i] = weights @ value[kv_head, :length] / weights.sum()
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_ragged", [False, True], ids=["together", "of several lengths"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.one_in(2)
def test_a_cache_that_grows(watched, kind, mask, is_ragged, dtype) -> None:
    """A cache grows token by token, into new pages and memory; two steps of a form are checked."""
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    (variants, allowed), cache = MASKS[mask], CACHES[kind]()
    first = normal(BATCH, KV_HEADS, 10, DIM, dtype=dtype)
    cache.append(first, first, np.array([5, 10]) if is_ragged else None)
    for step in range(30):
        token, query = (
            normal(BATCH, heads, 1, DIM, seed=step, dtype=dtype) for heads in (KV_HEADS, HEADS)
        )
        rows = cache.append(token, -token)
        out = rows.attention(query, *variants)
        expected = defined(query, rows, allowed)
        atol = 2e-6 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(out.astype(np.float64), expected, atol=atol, rtol=atol)
    # Once every sequence has filled its window, all have the same length: that is another form.
    forms = 2 if is_ragged and kind.startswith("rolling") else 1
    assert watched.computed == 2 * forms
    assert watched.prepared("forward", any_length=True) == forms
    forget_prepared_calls()
    assert rows.attention(query, *variants).tobytes() == out.tobytes()


@pytest.mark.parametrize("is_ragged", [False, True], ids=["together", "of several lengths"])
@pytest.mark.parametrize("kind", CACHES)
def test_tensors_in_a_cache_that_grows(watched, kind, is_ragged) -> None:
    """The query may have other strides; one that wants a gradient gets it, or an error."""
    cache, lens = CACHES[kind](), np.array([9, 10]) if is_ragged else None
    first = torch.from_numpy(normal(BATCH, KV_HEADS, 10, DIM))
    cache.append(first, first, lens)
    for step in range(8):
        token, query = (
            torch.from_numpy(normal(BATCH, heads, 1, DIM, seed=step)) for heads in (KV_HEADS, HEADS)
        )
        if step == 6:
            query = query.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
        rows = cache.append(token, -token)
        out, lse = rows.attention(query, qkv.Causal(), return_lse=True)
        assert type(out) is type(lse) is torch.Tensor
        expected = defined(query.numpy(), rows, lambda back: back >= 0)
        np.testing.assert_allclose(out, expected, atol=2e-6)
        assert torch.equal(out, rows.attention(query, qkv.Causal()))
    assert watched.computed == 2
    query.requires_grad_()
    if kind in ("arrays", "rolling"):
        rows.attention(query, qkv.Causal())[0, 0].sum().backward()
        assert query.grad[0, 0].abs().min() > 0
        assert not query.grad[1].any()
    else:
        with pytest.raises(qkv.UnsupportedError, match="torch differentiates this call"):
            rows.attention(query, qkv.Causal())
    with torch.no_grad():
        assert torch.equal(rows.attention(query, qkv.Causal()), out)


def test_every_page_table_is_checked(watched) -> None:
    """What a prepared step cannot serve is checked: an entry that is not a page, and one behind."""
    pages = normal(6, KV_HEADS, 4, DIM)
    query = normal(BATCH, HEADS, 1, DIM, seed=1)

    def step(table, lengths):
        rows = qkv.Paged(pages, np.array(table))
        return qkv.attention(query, rows, rows, qkv.KeyLengths(np.array(lengths)))

    for _ in range(3):
        expected = step([[0, 1, 2], [3, 4, 0]], [11, 6])
    computed = watched.computed
    step([[2, 1, 0], [3, 5, 0]], [10, 7])
    assert watched.computed == computed
    for wrong in (6, -1, 2**40):
        with pytest.raises(ShapeError, match="there are 6 pages"):
            step([[0, 1, wrong], [3, 4, 0]], [11, 6])
        behind = step([[0, 1, 2], [3, 4, wrong]], [11, 6])
        assert behind.tobytes() == expected.tobytes()
    with pytest.raises(ShapeError, match="kv_lens"):
        step([[0, 1, 2], [3, 4, 0]], [13, 6])


def test_positions_of_sequences_are_checked(watched) -> None:
    pages = normal(6, KV_HEADS, 4, DIM)
    query, lens = normal(BATCH, HEADS, 1, DIM, seed=1), qkv.KeyLengths(np.array([11, 6]))
    rows = qkv.Paged(pages, np.array([[0, 1, 2], [3, 4, 0]]))

    def step(q_offset):
        return qkv.attention(query, rows, rows, qkv.Causal(), lens, q_offset=q_offset)

    for _ in range(3):
        step(np.array([10, 5]))
    computed = watched.computed
    other = step(np.array([3, 2]))
    assert watched.computed == computed
    forget_prepared_calls()
    assert other.tobytes() == step(np.array([3, 2])).tobytes()
    for _ in range(3):
        step(np.array([10, 5]))
    for wrong in (np.array([2**62, 0]), np.array([0.5, 1.0]), np.array([1, 2, 3])):
        with pytest.raises(qkv.QkvError, match="q_offset"):
            step(wrong)
    # One number for all is another call.
    assert step(np.array(5)).tobytes() == step(5).tobytes()


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("kind", ["pages", "int8"])
def test_layouts_and_tensors(watched, kind, layout) -> None:
    """Tensors are read as the arrays that they are, in either layout, with lse."""
    rng = np.random.default_rng(3)

    def arranged(array):
        return array if layout == "bhld" else np.ascontiguousarray(array.swapaxes(-3, -2))

    def stored(length, wrap):
        values = rng.integers(-127, 128, (5, KV_HEADS, length, DIM)).astype(np.int8)
        scales = rng.random((5, KV_HEADS, length)).astype(np.float32) / 100
        scales = scales if layout == "bhld" else np.ascontiguousarray(scales.swapaxes(-2, -1))
        rows = qkv.Quantized(wrap(arranged(values)), wrap(scales))
        if kind == "int8":
            return qkv.Quantized(*[each[:BATCH] for each in (rows.values, rows.scales)])
        return qkv.Paged(rows, wrap(rng.integers(0, 5, (BATCH, 2))))

    for wrap in (np.asarray, torch.as_tensor):
        for step in range(4):
            key, value = stored(9 + step, wrap), stored(9 + step, wrap)
            query = wrap(arranged(normal(BATCH, HEADS, 2, DIM, seed=step)))
            given = {"layout": layout, "q_offset": "end", "return_lse": True}
            found = qkv.attention(query, key, value, qkv.Causal(), **given)
            expected = qkv.attention(query, key, value, qkv.Causal(), **given, backend="reference")
            for one, other in zip(found, expected, strict=True):
                assert type(one) is type(query)
                np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=2e-6)
    assert watched.prepared("forward", any_length=True) >= (kind == "int8")


def test_two_keys_of_other_layout_are_other_calls(watched) -> None:
    """Pages of other strides, and scales that lie apart, are not told to what was prepared."""
    query = normal(BATCH, HEADS, 1, DIM, seed=1)
    pages = normal(6, KV_HEADS, 4, DIM)
    table = np.array([[0, 1, 2], [3, 4, 5]])
    apart = np.repeat(pages, 2, axis=0)[::2]
    inside_out = np.ascontiguousarray(pages.swapaxes(1, 2)).swapaxes(1, 2)
    halves = pages.reshape(6, KV_HEADS, 2, 2, DIM).swapaxes(1, 2).reshape(12, KV_HEADS, 2, DIM)
    of_halves = (2 * table[..., None] + np.arange(2)).reshape(2, 6)
    results = []
    for each in (pages, apart, inside_out, halves) * 4:
        rows = qkv.Paged(each, of_halves if each is halves else table)
        results.append(qkv.attention(query, rows, rows).tobytes())
    assert len(set(results)) == 1
    values = np.random.default_rng(0).integers(-9, 9, (BATCH, KV_HEADS, 12, DIM)).astype(np.int8)
    scales = np.random.default_rng(1).random((BATCH, KV_HEADS, 24)).astype(np.float32)
    results = []
    for each in (scales[..., ::2], np.ascontiguousarray(scales[..., ::2])) * 4:
        rows = qkv.Quantized(values, each)
        results.append(qkv.attention(query, rows, rows).tobytes())
    assert len(set(results)) == 1


def test_a_result_that_is_not_finite_is_computed_again(watched) -> None:
    rows = qkv.Quantized(np.ones((1, 1, 8, 4), np.int8), np.ones((1, 1, 8), np.float32))
    query = np.ones((1, 1, 1, 4), np.float32)
    for _ in range(3):
        qkv.attention(query, rows, rows)
    query[0, 0, 0, 0] = np.nan
    assert np.isnan(qkv.attention(query, rows, rows)).all()
    query[0, 0, 0, 0] = 1
    np.testing.assert_array_equal(qkv.attention(query, rows, rows), np.ones((1, 1, 1, 4)))


@pytest.mark.parametrize("kind", ["pages", "int8", "int8 pages", "rolling int8", "arrays"])
@pytest.mark.parametrize("is_ragged", [False, True], ids=["together", "of several lengths"])
def test_the_latest_step_is_tried_first(watched, kind, is_ragged) -> None:
    """A step after one of other sizes is looked up, which takes 20 functions more."""
    caches = CACHES[kind](), CACHES[kind]()
    for cache in caches:
        first = normal(BATCH, KV_HEADS, 10, DIM)
        cache.append(first, first, np.array([5, 10]) if is_ragged else None)
    for step in range(12):
        token, query = (normal(BATCH, heads, 1, DIM, seed=step) for heads in (KV_HEADS, HEADS))
        rows, others = (cache.append(token, -token) for cache in caches)
        if step > 5:
            others.attention(np.repeat(query, 2, axis=1))
        calls = python_calls(lambda rows=rows, query=query: rows.attention(query))
        if step == 5:
            repeated = calls
        if step > 8:
            assert calls > repeated + 20
        expected = defined(query, rows, lambda back: back >= -math.inf)
        np.testing.assert_allclose(rows.attention(query), expected, atol=2e-6)


@pytest.mark.parametrize("kind", ["pages", "int8 pages"])
def test_page_tables_of_any_type_and_strides(kind) -> None:
    rng = np.random.default_rng(4)
    pages = normal(12, KV_HEADS, 4, DIM)
    stored = pages
    if kind == "int8 pages":
        values = rng.integers(-127, 128, pages.shape).astype(np.int8)
        stored = qkv.Quantized(values, rng.random(pages.shape[:-1]).astype(np.float32) / 50)
        pages = values * stored.scales[..., None]
    for step in range(24):
        table = rng.integers(0, 12, (BATCH, 6))[:, : 2 + step % 5]
        given = [
            table, table.astype(np.int32), np.asfortranarray(table), np.repeat(table, 2, 1)[:, ::2],
            table.astype(np.uint8),
        ][step % 3 + step % 2]  # fmt: skip
        query = normal(BATCH, HEADS, 1, DIM, seed=step)
        rows = qkv.Paged(stored, given)
        lens = rng.integers(1, 4 * table.shape[1] + 1, BATCH)
        found = qkv.attention(query, rows, rows, qkv.KeyLengths(lens))
        for b, length in enumerate(lens):
            own = np.concatenate([pages[n] for n in table[b]], axis=1)[:, :length]
            own = np.repeat(own.astype(np.float64), HEADS // KV_HEADS, axis=0)
            weights = np.exp(own @ query[b, :, 0, :, None] / math.sqrt(DIM))[..., 0]
            expected = (weights[:, None] @ own)[:, 0] / weights.sum(-1, keepdims=True)
            np.testing.assert_allclose(found[b, :, 0], expected, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("is_ragged", [False, True], ids=["together", "of several lengths"])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.one_in(3)
def test_rotated_keys(watched, kind, is_ragged, library, dtype) -> None:
    """Keys in storage of their own are gathered before they are rotated, and each query is rotated
    by its own position; two steps are checked, and those after them are prepared."""
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    cache, half = CACHES[kind](), DIM // 2

    def given(array):
        if library == "numpy":
            return array
        wide = torch.from_numpy(array.astype(np.float32))
        return wide.bfloat16() if array.dtype == ml_dtypes.bfloat16 else wide

    first = given(normal(BATCH, KV_HEADS, 10, DIM, dtype=dtype))
    cache.append(first, first, np.array([5, 10]) if is_ragged else None)

    def rotated(x, positions):
        angles = positions[:, None] / 10000 ** (np.arange(half) / half)
        one, two = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)

    for step in range(12):
        token, query = (
            normal(BATCH, heads, 1, DIM, seed=step, dtype=dtype) for heads in (KV_HEADS, HEADS)
        )
        rows = cache.append(given(token), given(-token))
        found = rows.attention(given(query), qkv.RoPE(), qkv.Causal())
        found = np.asarray(found.float() if library == "torch" else found, np.float64)
        (part,) = rows.parts
        for b, last in enumerate(np.broadcast_to(rows.q_offset, BATCH)):
            first_key = np.broadcast_to(part.kv_offset, BATCH)[b]
            seen = np.arange(last + 1 - first_key)
            seen = seen[-8:] if kind.startswith("rolling") else seen
            positions = first_key + seen
            turned = rotated(query[b], positions[-1:])
            key, value = (rows_of(stored, b)[:, seen] for stored in (part.key, part.value))
            key, value = (np.repeat(x, HEADS // KV_HEADS, axis=0) for x in (key, value))
            scores = (rotated(key, positions) @ turned.swapaxes(-1, -2))[..., 0] / math.sqrt(DIM)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            expected = (weights[:, None] @ value)[:, 0] / weights.sum(-1, keepdims=True)
            atol = 5e-6 if dtype == "float32" else 2e-2
            np.testing.assert_allclose(found[b, :, 0], expected, atol=atol)
    # Once every sequence has filled its window, all have the same length: that is another form.
    forms = 2 if is_ragged and kind.startswith("rolling") else 1
    assert watched.prepared("forward", any_length=True) == forms
    assert watched.computed == 2 * forms


@pytest.mark.parametrize("variants", [(), (qkv.Causal(),)], ids=["nothing", "causal"])
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy])
def test_queries_at_the_end_of_each_sequence_are_rotated(watched, variants, library) -> None:
    half = DIM // 2
    inv_freq = 1 / 10000 ** (np.arange(half) / half)

    def rotated(x, positions):
        turned = np.exp(1j * positions[:, None] * inv_freq) * (x[..., :half] + 1j * x[..., half:])
        return np.concatenate([turned.real, turned.imag], axis=-1)

    rng = np.random.default_rng(1)
    for step in range(8):
        query = normal(BATCH, HEADS, 2, DIM, seed=step)
        key, value = normal(2, BATCH, KV_HEADS, 20 + step, DIM, seed=step + 50)
        lens = np.array([9, 9]) if step < 3 else rng.integers(2, 21 + step, BATCH)
        found = qkv.attention(
            *map(library, (query, key, value)), qkv.RoPE(), qkv.KeyLengths(lens), *variants,
            q_offset="end",
        )  # fmt: skip
        for b, length in enumerate(lens):
            own = np.repeat(rotated(key[b, :, :length], np.arange(length)), 2, axis=0)
            scores = rotated(query[b], length - 2 + np.arange(2)) @ own.swapaxes(-1, -2)
            if variants:
                scores[:, 0, -1] = -np.inf
            weights = np.exp(scores / math.sqrt(DIM))
            values = np.repeat(value[b, :, :length].astype(np.float64), 2, axis=0)
            expected = weights @ values / weights.sum(-1, keepdims=True)
            np.testing.assert_allclose(found[b], expected, atol=5e-6)
    assert watched.prepared("forward", any_length=True) == 1
    assert watched.computed == 2
