"""int8 keys with a large mean in each channel, beside the same attention in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import qkv
import qkv.cache
from qkv.errors import ArgumentError, ShapeError

BATCH, HEADS, KV_HEADS, DIM, TOKENS = 2, 4, 2, 32, 200

CACHES: dict[str, Callable[..., Any]] = {
    "contiguous": lambda dtype: qkv.cache.ContiguousCache(dtype=dtype),
    "paged": lambda dtype: qkv.cache.PagedCache(page_size=16, dtype=dtype),
    "rolling": lambda dtype: qkv.cache.RollingCache(64, dtype=dtype, sinks=4),
}
CALLS: dict[str, tuple[Any, ...]] = {
    "causal": (qkv.Causal(),),
    "sinks": (qkv.Causal(), qkv.Sinks(np.linspace(-1.0, 4.0, HEADS))),
    "softcap": (qkv.Softcap(4.0), qkv.Causal()),
    "window": (qkv.SlidingWindow(9, 0),),
    "rope": (qkv.RoPE(), qkv.Causal()),
}


def rows(bias: float) -> tuple[Any, Any, Any]:
    """Query of the last token, and keys and values; the bias is of each kv head and channel."""
    rng = np.random.default_rng(0)
    key, value = rng.normal(size=(2, BATCH, KV_HEADS, TOKENS, DIM))
    key += bias * rng.normal(size=(1, KV_HEADS, 1, DIM))
    query = rng.normal(size=(BATCH, HEADS, 1, DIM))
    return tuple(array.astype(np.float32) for array in (query, key, value))


def filled(cache: Any, key: Any, value: Any, prompt: int = 150) -> Any:
    cache.append(key[:, :, :prompt], value[:, :, :prompt])
    for i in range(prompt, TOKENS):
        found = cache.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
    return found


def error(kind: str, variants: tuple[Any, ...], bias: float) -> tuple[float, float]:
    """Largest errors of output and lse beside a cache that keeps float64."""
    query, key, value = rows(bias)
    exact = filled(CACHES[kind](None), *(x.astype(np.float64) for x in (key, value)))
    out, lse = exact.attention(query.astype(np.float64), *variants, return_lse=True)
    int8 = filled(CACHES[kind]("int8"), key, value)
    ours, our_lse = int8.attention(query, *variants, return_lse=True)
    return float(np.abs(ours - out).max()), float(np.abs(our_lse - lse).max())


@pytest.mark.slow
@pytest.mark.sampled(
    ("kind", "call"), [(kind, call) for kind in CACHES for call in CALLS if call != "rope"],
    one_in=6,
)  # fmt: skip
def test_a_bias_of_20_costs_no_precision(kind: str, call: str) -> None:
    """Errors stay those of keys without a bias; with one scale a row they are some 20 times that.

    Sums of products with so large keys round in float32, and lse is some hundreds.
    """
    rounding = 2.0**-22 * 20 * DIM
    for biased, plain in zip(error(kind, CALLS[call], 20.0), error(kind, CALLS[call], 0.0),
                             strict=True):  # fmt: skip
        assert biased < 2 * plain + rounding


def stored(offset: Any = None, page_size: int | None = None) -> tuple[Any, Any]:
    """A quantised key and the float64 array that it stands for."""
    rng = np.random.default_rng(1)
    values = rng.integers(-127, 128, (BATCH, KV_HEADS, 32, DIM)).astype(np.int8)
    scales = rng.uniform(0.01, 0.03, values.shape[:-1]).astype(np.float32)
    wide = values * scales.astype(np.float64)[..., None]
    if offset is not None:
        wide = wide + offset[:, None].astype(np.float64)
    if page_size is None:
        return qkv.Quantized(values, scales, offset), wide
    pages = [a.reshape(BATCH, KV_HEADS, -1, page_size, *a.shape[3:]).swapaxes(1, 2)
             for a in (values, scales)]  # fmt: skip
    pages = [np.ascontiguousarray(a.reshape(-1, *a.shape[2:])) for a in pages]
    table = np.arange(BATCH * 32 // page_size).reshape(BATCH, -1)
    return qkv.Paged(qkv.Quantized(*pages, offset), table), wide


OFFSET = (5 * np.random.default_rng(2).normal(size=(KV_HEADS, DIM))).astype(np.float32)


@pytest.mark.slow
@pytest.mark.sampled(
    ("call", "page_size", "q_len"), list(product(CALLS, (None, 8), (1, 32))), one_in=6
)
def test_the_offset_is_part_of_the_key(call: str, page_size: int | None, q_len: int) -> None:
    key, wide = stored(OFFSET, page_size)
    query = np.random.default_rng(3).normal(size=(BATCH, HEADS, q_len, DIM))
    variants = CALLS[call]
    value, _ = stored(None, page_size)
    plain = wide - OFFSET[:, None]
    out, lse = qkv.attention(query, wide, plain, *variants, q_offset=32 - q_len, return_lse=True)
    ours, our_lse = qkv.attention(
        query, key, value, *variants, q_offset=32 - q_len, return_lse=True
    )
    np.testing.assert_allclose(ours, out, rtol=0, atol=1e-12)
    np.testing.assert_allclose(our_lse, lse, rtol=1e-12)
    record = qkv.inspect(query, key, value, *variants, q_offset=32 - q_len)
    wanted = qkv.inspect(query, wide, plain, *variants, q_offset=32 - q_len)
    np.testing.assert_allclose(record.weights[...], wanted.weights[...], rtol=0, atol=1e-12)
    np.testing.assert_allclose(record.entropy, wanted.entropy, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_bits_of_a_row_follow_neither_from_strides_nor_from_other_rows(dtype: str) -> None:
    """The matrix product of NumPy, which took the product with the offset, rounds differently."""
    query, key, value = rows(20.0)
    query = np.random.default_rng(1).normal(size=(BATCH, HEADS, 3, DIM)).astype(dtype)
    stored = filled(CACHES["contiguous"]("int8"), key, value)

    def attended(query: Any) -> tuple[bytes, ...]:
        results = stored.attention(query, q_offset=0, return_lse=True)
        return tuple(part.tobytes() for row in range(3) for part in (r[:, :, row] for r in results))

    whole = attended(query)
    assert attended(query.mT.copy().mT) == whole
    one_by_one = [
        stored.attention(query[:, :, row : row + 1], q_offset=0, return_lse=True)
        for row in range(3)
    ]
    assert tuple(part.tobytes() for results in one_by_one for part in results) == whole


def test_a_later_query_of_the_same_kind_has_its_own() -> None:
    key, wide = stored(OFFSET)
    value, plain = stored()
    for seed in range(4):
        query = np.random.default_rng(seed).normal(size=(BATCH, HEADS, 1, DIM))
        for ours, theirs in (
            (qkv.attention(query, key, value, return_lse=True),
             qkv.attention(query, wide, plain, return_lse=True)),
            (qkv.attention(*map(tensors, (query, key, value)), return_lse=True),
             qkv.attention(query, wide, plain, return_lse=True)),
        ):  # fmt: skip
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(np.asarray(one), other, rtol=1e-12, atol=1e-12)


def tensors(array: Any) -> Any:
    if isinstance(array, qkv.Quantized):
        parts = (array.values, array.scales, array.offset)
        return qkv.Quantized(*(None if x is None else torch.from_numpy(x) for x in parts))
    return torch.from_numpy(array)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_mean_is_of_the_first_tokens_that_are_real(library: str) -> None:
    _, key, value = rows(20.0)
    as_rows = torch.from_numpy if library == "torch" else np.asarray
    cache = qkv.cache.PagedCache(dtype="int8")
    lens = np.array([40, 25])
    found = cache.append(as_rows(key[:, :, :50]), as_rows(value[:, :, :50]), lens)
    mean = sum(key[b, :, :n].sum(1, dtype=np.float64) for b, n in enumerate(lens)) / lens.sum()
    as_array = np.asarray if library == "numpy" else torch.Tensor.numpy
    before = as_array(found.key.pages.offset).copy()
    np.testing.assert_allclose(before, mean, rtol=1e-6)
    found = cache.fork().append(as_rows(key[:, :, 50:]), as_rows(value[:, :, 50:]))
    np.testing.assert_array_equal(as_array(found.key.pages.offset), before)


def test_few_tokens_have_no_mean_to_trust() -> None:
    _, key, value = rows(20.0)
    found = qkv.cache.ContiguousCache(dtype="int8").append(key[:, :, :5], value[:, :, :5])
    assert found.key.offset is None
    broken = key.copy()
    broken[0, 0, 0, 0] = np.inf
    found = qkv.cache.ContiguousCache(dtype="int8").append(broken, value)
    assert found.key.offset is None


def test_offsets_that_do_not_fit_are_refused() -> None:
    key, value = (stored(offset)[0] for offset in (OFFSET, None))
    key = replace(key, offset=OFFSET.T.copy())
    query = np.zeros((BATCH, HEADS, 1, DIM), np.float32)
    with pytest.raises(ShapeError, match=r"offset float32 \(32, 2\)"):
        qkv.attention(query, key, value)
    key, _ = stored(OFFSET)
    with pytest.raises(ArgumentError, match="only keys may have"):
        qkv.attention(query, key, key)
