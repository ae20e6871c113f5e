"""Rows as int8: the error that is stated, and what no scale can stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import qkv
from qkv.cache import ContiguousCache, PagedCache, quantize
from qkv.cache.memory import TorchMemory

DTYPES = ("float64", "float32", "float16", "bfloat16")


def rows_of(library: str, dtype: str) -> tuple[Any, Any]:
    """Rows of very different sizes, as an array of the library and in float64."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2, 3, 50, 16)) * 10.0 ** rng.uniform(-3, 3, size=(2, 3, 50, 1))
    torch = pytest.importorskip("torch", reason="tensors, and bfloat16 rounded by another library")
    tensor = torch.from_numpy(rows).to(getattr(torch, dtype))
    exact = tensor.double().numpy()
    if library == "torch":
        return tensor, exact
    if library == "jax":
        jnp = pytest.importorskip("jax.numpy", reason="JAX arrays")
        return jnp.asarray(exact.astype(np.float32)).astype(dtype), exact
    from ml_dtypes import bfloat16

    return exact.astype(bfloat16 if dtype == "bfloat16" else dtype), exact


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_an_entry_changes_by_half_a_step(library: str, dtype: str) -> None:
    if (library, dtype) == ("jax", "float64"):
        dtype = "float32"  # JAX has no float64 unless it is told so
    rows, exact = rows_of(library, dtype)
    found = quantize(rows)
    values, scales = np.asarray(found.values), np.asarray(found.scales)
    assert (values.dtype, scales.dtype) == (np.int8, np.float32)
    stood_for = values * scales.astype(np.float64)[..., None]
    step = np.abs(exact).max(-1, keepdims=True) / 127
    assert (np.abs(stood_for - exact) <= step / 2 * (1 + 1e-5)).all()
    assert (np.abs(values).max(-1) == 127).all()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_another_device_has_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, dtype: str, compiled: bool
) -> None:
    """A kernel, or NumPy, rounds rows in main memory; torch those on another device, here this."""
    if not compiled:
        monkeypatch.setattr("qkv.cache.memory.int8_rows", lambda *_: None)
    rows, _ = rows_of("torch", dtype)
    rows[0, 0, 3], rows[0, 1, 4, 5], rows[0, 2, 6, 7] = 0, np.inf, np.nan
    offset = rows[0, :, 7].float()
    memory = TorchMemory()
    for given in (None, offset):
        [here] = memory.int8_with_scales([memory.rows_of(rows, "rows")], given)
        [there] = memory.int8_with_scales([rows], given)
        for found, expected in zip(map(memory.restored, here), there, strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


def test_rows_without_a_scale() -> None:
    rows = np.zeros((4, 3), np.float32)
    rows[1, 2], rows[2, 0], rows[3] = np.nan, -np.inf, np.finfo(np.float32).smallest_subnormal
    found = quantize(rows)
    with np.errstate(invalid="ignore"):
        stood_for = found.values * found.scales[:, None]
    assert (stood_for[0] == 0).all()
    assert np.isnan(stood_for[1:3]).all(), "NaN and infinity are not hidden"
    assert np.abs(stood_for[3]).max() <= 2e-45
    largest = 127 * float(np.finfo(np.float32).max)
    beyond = quantize(np.array([[1.0, largest], [1.0, 1.01 * largest]]))
    assert np.isfinite(beyond.scales).tolist() == [True, False]
    with pytest.raises(qkv.ShapeError, match="rows is a single number"):
        quantize(np.array(3, np.float32))


@pytest.mark.slow
def test_where_numpy_raises_floating_point_errors() -> None:
    key = np.full((1, 1, 20, 4), 1e-42, np.float32)
    with np.errstate(all="raise"):
        found = quantize(key)  # steps of subnormal rows underflow
        ContiguousCache(dtype="int8").append(key, key)
    assert found.values.all()


@pytest.mark.parametrize("make", [ContiguousCache, PagedCache])
def test_scores_and_outputs_change_as_stated(make: Any) -> None:
    rng = np.random.default_rng(1)
    query, key, value = rng.normal(size=(3, 2, 2, 300, 64))
    held = make(dtype="int8")
    rows = held.append(key, value)
    scale = 64**-0.5
    out, lse = rows.attention(query, qkv.Causal(), return_lse=True)
    exact_out, exact_lse = qkv.attention(query, key, value, qkv.Causal(), return_lse=True)
    of_scores = scale * np.abs(query).sum(-1) * (np.abs(key).max() / 254)
    assert (np.abs(lse - exact_lse) <= of_scores).all()
    # Weights change by a factor of exp(2 of_scores) at most, values by half a step.
    largest = np.abs(value).max()
    bound = largest / 254 + np.expm1(2 * of_scores)[..., None] * largest
    change = np.abs(out - exact_out)
    assert (change <= bound).all()
    # What it is in practice, for rows of normal numbers; docs/caches.md states it.
    assert 1e-4 < np.sqrt((change**2).mean() / (exact_out**2).mean()) < 0.01


def test_a_token_takes_the_bytes_that_are_stated() -> None:
    x, wide = np.ones((1, 8, 64, 128), np.float32), np.ones((1, 8, 64, 64), np.float32)
    for make, tokens in ((lambda **o: ContiguousCache(64, **o), 64), (PagedCache, 256)):
        for dtype, token in ((None, 8 * (128 + 64) * 4), ("int8", 8 * (128 + 64 + 8))):
            held = make(dtype=dtype)
            held.append(x, wide)
            assert held.nbytes == tokens * token


def of_mean(mean: float, tokens: int = 20) -> np.ndarray:
    rows = np.random.default_rng(0).normal(size=(1, 1, tokens, 8))
    return (rows + mean).astype(np.float32)


def dense_keys(cache: Any) -> np.ndarray:
    """Keys as a query of unit vectors reads them, one channel after another."""
    query = np.eye(8, dtype=np.float32)[None, None]
    rows, lens = cache.read(), int(cache.lengths[0])
    scores = []
    for n in range(lens):
        # A table, since a number in a function would make a kernel of its own.
        chosen = qkv.Mask(np.tile(np.arange(lens) == n, (len(query[0, 0]), 1)))
        scores.append(rows.attention(query, chosen, scale=1.0, q_offset=0, return_lse=True)[1])
    return np.stack(scores, -1)[0, 0].T


MAKE = {
    "contiguous": lambda: ContiguousCache(dtype="int8"),
    "rolling": lambda: qkv.cache.RollingCache(64, dtype="int8"),
    "pages": lambda: PagedCache(16, dtype="int8"),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_fork_that_begins_anew_leaves_the_keys_of_others_alone(kind: str) -> None:
    cache = MAKE[kind]()
    keys = of_mean(5.0)
    cache.append(keys, keys)
    fork = cache.fork()
    fork.reset()
    other = of_mean(-50.0, tokens=30)
    fork.append(other, other)
    np.testing.assert_allclose(dense_keys(cache), keys[0, 0], atol=0.02)
    # Pages are stored together, and have one mean.
    np.testing.assert_allclose(
        dense_keys(fork), other[0, 0], atol=0.25 if kind == "pages" else 0.02
    )


@pytest.mark.parametrize("kind", MAKE)
def test_a_cache_that_is_reset_takes_the_mean_of_what_comes_next(kind: str) -> None:
    cache = MAKE[kind]()
    cache.append(of_mean(500.0), of_mean(500.0))
    cache.reset()
    keys = of_mean(0.0)
    cache.append(keys, keys)
    np.testing.assert_allclose(dense_keys(cache), keys[0, 0], atol=0.02)


def test_rows_that_were_refused_leave_no_mean() -> None:
    cache = PagedCache(4, num_pages=6, dtype="int8")
    with pytest.raises(qkv.ShapeError, match="pages are needed"):
        cache.append(of_mean(500.0, tokens=40), of_mean(500.0, tokens=40))
    keys = of_mean(0.0)
    cache.append(keys, keys)
    np.testing.assert_allclose(dense_keys(cache), keys[0, 0], atol=0.02)


@pytest.mark.parametrize("first", [3, 20], ids=["too few for a mean", "mean"])
def test_two_forks_of_an_empty_pool_keep_one_offset(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is the first to write, while the other has encoded its rows."""
    root = PagedCache(4, dtype="int8")
    one, two = root.fork(), root.fork()
    encoded = qkv.cache.pages.paged.new_tokens
    near, far = of_mean(1.0), of_mean(-40.0, tokens=first)

    def while_another_appends(*arguments: Any) -> Any:
        monkeypatch.setattr(qkv.cache.pages.paged, "new_tokens", encoded)
        arrived = encoded(*arguments)
        two.append(far, far)
        return arrived

    monkeypatch.setattr(qkv.cache.pages.paged, "new_tokens", while_another_appends)
    one.append(near, near)
    np.testing.assert_allclose(dense_keys(one), near[0, 0], atol=0.25)
    np.testing.assert_allclose(dense_keys(two), far[0, 0], atol=0.25)


@pytest.mark.parametrize("v_head_dim", [16, 24], ids=["one size", "two sizes"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_keys_and_values_change_by_half_a_step_of_their_own(library: str, v_head_dim: int) -> None:
    """Keys may be a parameter, and a row may hold infinity."""
    key, exact_key = rows_of(library, "float32")
    exact_value = np.tile(exact_key[..., :1], v_head_dim)
    exact_value[0, 0, 3, 1] = np.inf
    held, value = ContiguousCache(dtype="int8"), exact_value.astype(np.float32)
    if library == "torch":
        import torch

        key, value = torch.nn.Parameter(key), torch.from_numpy(value)
        with torch.no_grad():
            rows = held.append(key, value)
    else:
        rows = held.append(key, value)
    offset = np.asarray(rows.key.offset, np.float64)[:, None]
    for stored, exact, less in ((rows.key, exact_key, offset), (rows.value, exact_value, 0.0)):
        assert type(stored.values) is type(value)
        values, scales = np.asarray(stored.values), np.asarray(stored.scales, np.float64)
        finite = np.isfinite(exact).all(-1)
        kept = (exact - less)[finite]
        error = np.abs(values[finite] * scales[finite, None] - kept)
        step = np.abs(kept).max(-1, keepdims=True) / 127
        assert (error <= step / 2 * (1 + 1e-4)).all()
        assert not np.isfinite(scales[~finite]).any()


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(20, 8), (2, 20, 8), (2, 3, 2, 20, 8)])
@pytest.mark.parametrize("kind", ["contiguous", "rolling"])
def test_rows_of_any_number_of_dimensions(kind: str, shape: tuple[int, ...], library: str) -> None:
    """Two dimensions are one head; so many rows have a mean."""
    key, value = np.random.default_rng(2).normal(size=(2, *shape)).astype(np.float32)
    pair = (key, value)
    if library == "torch":
        torch = pytest.importorskip("torch", reason="tensors")
        pair = torch.from_numpy(key), torch.from_numpy(value)
    found = MAKE[kind]().append(*pair).attention(pair[0], qkv.Causal())
    expected = qkv.attention(key, key, value, qkv.Causal())
    assert np.abs(np.asarray(found) - expected).max() < 0.03
    if library == "torch":
        offset = torch.ones((1, *shape)[-3], 8)
        [there] = TorchMemory().int8_with_scales([pair[0]], offset)
        [here] = TorchMemory().int8_with_scales([key], offset)
        np.testing.assert_array_equal(here[0], there[0])
