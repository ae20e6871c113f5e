"""Positions and values so large that something in between could leave its type."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest

import qkv
from qkv.backends.cpu import backend as cpu_backend
from qkv.problem import overflow

FARTHEST = 2**31 - 1


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("backend", ["cpu", "blocked", "reference"])
@pytest.mark.sampled(("q_len", "side"), list(product([1, 30], ["left", "right"])), one_in=4)
def test_windows_wider_than_32_bits(backend, q_len, side) -> None:
    """Windows were once cut to 2**31 - 1, though positions may be up to 2**32 apart."""
    query, key = normal(q_len, 4), normal(40, 4, seed=1)
    sign = 1 if side == "left" else -1
    offsets = {"q_offset": sign * FARTHEST, "kv_offset": -sign * FARTHEST}
    apart = 2 * FARTHEST
    for width, allowed in ((2**40, 40), (apart, None), (apart - 39, None), (FARTHEST, 0)):
        window = qkv.SlidingWindow(width, 0) if side == "left" else qkv.SlidingWindow(0, width)
        for _ in range(3):
            lse = qkv.attention(
                query, key, key, window, backend=backend, return_lse=True, **offsets
            )[1]  # fmt: skip
        q_pos = offsets["q_offset"] + np.arange(q_len)[:, None]
        kv_pos = offsets["kv_offset"] + np.arange(40)[None, :]
        seen = sign * (q_pos - kv_pos) <= width
        assert allowed is None or (seen.sum(axis=1) == allowed).all()
        scores = np.where(seen, 0.5 * query.astype(float) @ key.astype(float).T, -np.inf)
        with np.errstate(divide="ignore"):
            expected = np.log(np.exp(scores).sum(axis=1))
        np.testing.assert_allclose(lse, expected, rtol=1e-5, atol=1e-5)


def test_a_window_of_all_integers_is_no_window() -> None:
    query = normal(8, 4)
    wide = qkv.attention(query, query, query, qkv.SlidingWindow(2**63 - 1, 2**80))
    assert wide.tobytes() == qkv.attention(query, query, query).tobytes()


def huge_mean(dtype, q_len, kv_len=1000, v_head_dim=20):
    """Equal weights, and values whose sum only is beyond the type; their means in float64."""
    rng = np.random.default_rng(5)
    query = np.zeros((2, q_len, 16), dtype)
    key = normal(2, kv_len, 16, dtype=dtype, seed=1)
    value = rng.uniform(0.5, 1.5, (2, kv_len, v_head_dim))
    # Every other column is ordinary, and one is so small that no scale may touch it.
    value *= np.where(np.arange(v_head_dim) % 2, 1.0, np.float64(np.finfo(np.float32).max) / 4)
    value[..., 1] = rng.uniform(0.5, 1.5, value.shape[:-1]) * 2.0**-120
    value = value.astype(dtype)
    return query, key, value, value.astype(np.float64).mean(axis=1)[:, None, :]


TOLERANCE = {np.dtype(np.float32): 2e-6, np.dtype(ml_dtypes.bfloat16): 2**-7}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("q_len", [1, 5, 40])
@pytest.mark.parametrize("repeats", [1, 4])
def test_means_of_values_whose_sum_is_infinite(backend, dtype, q_len, repeats) -> None:
    """`sum p v` was infinite before it was divided; prepared calls too."""
    query, key, value, mean = huge_mean(np.dtype(dtype), q_len)
    for _ in range(repeats):
        out = qkv.attention(query, key, value, q_offset="end", backend=backend)
    expected = np.broadcast_to(mean, out.shape)
    np.testing.assert_allclose(out.astype(float), expected, rtol=TOLERANCE[np.dtype(dtype)])


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("q_len", [1, 40])
def test_large_values_in_float64(backend, q_len) -> None:
    value = np.full((100, 3), 1e308)
    found = qkv.attention(
        np.zeros((q_len, 4)), normal(100, 4).astype(float), value, backend=backend
    )
    np.testing.assert_allclose(found, 1e308, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_merged_means_of_the_largest_number(dtype) -> None:
    """One row in six was infinite, since shares add up to one but for rounding."""
    rng, largest = np.random.default_rng(0), np.finfo(dtype).max
    wide = np.float64 if dtype == np.float64 else np.float32
    for count in (1, 2, 3, 5):
        lses = rng.normal(scale=3, size=(count, 500)).astype(wide)
        for sign in (1, -1):
            parts = [(np.full((500, 1), sign * largest, dtype), lse) for lse in lses]
            out, _ = qkv.merge(*parts)
            units = np.abs(out / (sign * largest) - 1) / np.finfo(dtype).eps
            assert units.max() <= count + 1
    infinite = [(np.full((2, 1), np.inf, dtype), np.zeros(2, wide)), *(
        (np.full((2, 1), v, dtype), np.zeros(2, wide)) for v in (1, largest)
    )]  # fmt: skip
    assert np.isinf(qkv.merge(*infinite)[0]).all()


@pytest.mark.parametrize("backend", ["cpu", "blocked", "reference"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.sampled(("q_len", "sinks"), list(product([1, 30], [False, True])), one_in=2)
def test_means_of_the_largest_number(backend, dtype, q_len, sinks) -> None:
    """Weights whose sum is rounded to more than 1 made it infinite."""
    largest = np.finfo(dtype).max
    query, key = normal(4, q_len, 8, dtype=dtype), normal(4, 50, 8, dtype=dtype, seed=1)
    value = np.full((4, 50, 3), largest)
    variants = (qkv.Sinks(1.0),) if sinks else ()
    for _ in range(3):
        out, lse = qkv.attention(
            query, key, value, *variants, backend=backend, return_lse=True
        )  # fmt: skip
        shares = 1 - np.exp(1.0 - lse[..., None]) if sinks else 1.0
        np.testing.assert_allclose(out / largest, np.broadcast_to(shares, out.shape), rtol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.sampled("variant", ["none", "causal", "sinks", "rope", "dropout"], one_in=5)
def test_large_values_beside_variants(backend, q_len, variant) -> None:
    """The output has the same digits for values of 1 and for values of 2**125."""
    variants = {
        "none": (), "causal": (qkv.Causal(align="end"),), "sinks": (qkv.Sinks(1.0),),
        "rope": (qkv.RoPE(), qkv.Causal(align="end")), "dropout": (qkv.Dropout(0.25, 1),),
    }[variant]  # fmt: skip
    query, key = normal(2, q_len, 16), normal(2, 500, 16, seed=1)
    value = np.abs(normal(2, 500, 20, seed=2)) + 1
    for _ in range(3):
        small, large = (
            qkv.attention(query, key, scale * value, *variants, q_offset="end", backend=backend)
            for scale in (1, np.float32(2.0**125))
        )
        np.testing.assert_allclose(large.astype(float) * 2.0**-125, small, rtol=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("q_len", [1, 40])
def test_infinite_values_stay_infinite(backend, q_len) -> None:
    """Large values beside them stay finite; a query without keys gives zeros."""
    value = np.full((500, 6), 1e36, np.float32)
    value[7, 0], value[9, 1], value[11, 2] = np.inf, -np.inf, np.nan
    mask = np.ones((q_len, 500), bool)
    mask[0] = q_len == 1
    for _ in range(3):
        found = qkv.attention(
            np.zeros((q_len, 4), np.float32), normal(500, 4), value, mask, backend=backend
        )
        assert (found[0] == 0).all() or q_len == 1
        rows = found[q_len > 1 :]
        assert np.isposinf(rows[:, 0]).all()
        assert np.isneginf(rows[:, 1]).all()
        assert np.isnan(rows[:, 2]).all()
        np.testing.assert_allclose(rows[:, 3:], 1e36, rtol=500 * 2**-24)


@pytest.mark.parametrize("q_len", [1, 40])
def test_quantised_values_whose_sum_is_infinite(q_len) -> None:
    values = np.full((1, 600, 5), 100, np.int8)
    scales = np.full((1, 600), 1e35, np.float32)
    key = normal(1, 600, 4)
    query = np.zeros((1, q_len, 4), np.float32)
    found = qkv.attention(query, key, qkv.Quantized(values, scales), backend="cpu")
    np.testing.assert_allclose(found, 1e37, rtol=1e-6)


@pytest.mark.slow
def test_large_values_of_tensors() -> None:
    torch = pytest.importorskip("torch")
    query, key = torch.zeros(1, 2, 40, 16), torch.zeros(1, 2, 1000, 16)
    value = torch.full((1, 2, 1000, 8), 1e36)
    for queries in (query, query[..., :1, :]):
        for _ in range(4):
            found = qkv.attention(queries, key, value, q_offset="end")
            torch.testing.assert_close(found, torch.full_like(found, 1e36))
    leaf = value.clone().requires_grad_()
    out = qkv.attention(query, key, leaf, q_offset="end")
    torch.testing.assert_close(out, torch.full_like(out, 1e36))
    out.sum().backward()
    torch.testing.assert_close(leaf.grad, torch.full_like(leaf, 40 / 1000))


def test_ordinary_values_are_computed_once(monkeypatch) -> None:
    """The remedy is for outputs that are not finite."""

    def refuse(*_):
        raise AssertionError("computed again")

    for module in (overflow, cpu_backend):
        monkeypatch.setattr(module, "recomputed", refuse)
    for backend in ("cpu", "blocked", "reference"):
        for q_len in (1, 40):
            query = normal(2, q_len, 16)
            qkv.attention(query, normal(2, 64, 16), normal(2, 64, 16), backend=backend)


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_what_is_not_finite_is_looked_at_by_one_function(backend, monkeypatch) -> None:
    asked = []

    def watched(problem, out, run, recomputed=overflow.recomputed):
        asked.append(out)
        return recomputed(problem, out, run)

    monkeypatch.setattr(overflow, "recomputed", watched)
    value = np.ones((1, 100, 4))
    value[0, 7, 0] = np.inf
    out = qkv.attention(np.zeros((1, 3, 4)), np.zeros((1, 100, 4)), value, backend=backend)
    np.testing.assert_allclose(out, np.broadcast_to([np.inf, 1, 1, 1], out.shape))
    assert len(asked) == 1


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_masses_of_scores_whose_last_bit_is_large(backend, dtype) -> None:
    """`exp(s - lse)` was infinite, since two ways to add up a score differ by 64 near 10^9."""
    query = (normal(2, 40, 24, seed=1) * 1e9).astype(dtype)
    key = normal(1, 64, 24, seed=2).astype(dtype)
    record = qkv.inspect(query, key, np.ones_like(key), q_offset=0, backend=backend)
    best = (query.astype(float) @ key.astype(float).mT).argmax(axis=-1)
    for offset in range(-5, 20):
        right = best == np.arange(40) + offset
        np.testing.assert_allclose(record.mass_at(offset), right, rtol=0, atol=1e-5)
    for keys in ([3], [0, 5, 60], slice(10, 40)):
        right = np.isin(best, np.arange(64)[keys])
        np.testing.assert_allclose(record.mass(keys), right, rtol=0, atol=1e-5)
