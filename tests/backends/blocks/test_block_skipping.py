"""Blocks of pairs whose weights are exactly 0 are left out, and nobody can tell."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest

import qkv
from qkv.backends.cpu import CpuBackend
from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.passes.backward import BackwardPass
from qkv.backends.cpu.passes.forward import ForwardPass
from qkv.backends.cpu.plan import block_skipping as block_skipping
from qkv.problem.backward import BackwardInputs
from qkv.problem.building.builder import Shape
from qkv.problem.building.check import check
from qkv.testing import Case, check_case, truth
from qkv.testing.tolerances import bounds

DTYPES = {"float32": np.float32, "float64": np.float64, "bfloat16": ml_dtypes.bfloat16,
          "float16": np.float16}  # fmt: skip
LENGTH = 1472
SLOPES = (1.0, 0.5)
STEEP = (qkv.ALiBi(np.array(SLOPES)), qkv.Causal())


def arrays(dtype="float32", length=LENGTH, dim=64, heads=2, seed=0):
    rng = np.random.default_rng(seed)
    shape = 1, heads, length, dim
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(4)]


@pytest.fixture
def always(monkeypatch):
    """However small the problem is, and however little is spared."""
    monkeypatch.setattr(block_skipping, "_LEAST_OPERATIONS", 0)
    monkeypatch.setattr(block_skipping, "_LEAST_SHARE", 0)
    block_skipping._heads_with_falling_bias.cache_clear()
    yield
    block_skipping._heads_with_falling_bias.cache_clear()


def pairs(*variants, dtype="float32", change=lambda *arrays: None, length=LENGTH):
    """Pairs that the passes of a problem compute."""
    q, k, v, grad_out = arrays(dtype, length)
    change(q, k, v, grad_out)
    problem = check(q, k, v, variants)
    forward = ForwardPass(problem).plan.pairs
    rows = np.zeros(q.shape[:-1], np.float32)
    inputs = BackwardInputs(out=v, lse=rows, grad_out=grad_out, grad_lse=rows)
    passed = BackwardPass(problem, corrects_delta=False, names=(), out_dtype=v.dtype, inputs=inputs)
    return forward, passed.plan.pairs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_far_away_are_not_computed(dtype):
    # With matrix tiles a task has up to 1,024 queries, so that blocks are large.
    length = 4 * LENGTH if host().kernels == "amx" else LENGTH
    all_pairs = pairs(qkv.Causal(), dtype=dtype, length=length)
    few_pairs = pairs(*STEEP, dtype=dtype, length=length)
    share = 0.7 if dtype in ("float32", "float16") else 1.0
    for few, many in zip(few_pairs, all_pairs, strict=True):
        assert few < share * many


def heavy(q, k, v, grad_out):
    q[..., 0], k[..., 0, :], k[..., 0, 0] = 1, 0, 30_000


def not_a_key(q, k, v, grad_out):
    k[..., 5, 7] = np.nan


def no_value(q, k, v, grad_out):
    v[..., 5, 7] = np.inf


def no_query(q, k, v, grad_out):
    q[..., -1, 7] = np.nan


def no_cotangent(q, k, v, grad_out):
    grad_out[..., -1, 7] = np.nan


@pytest.mark.slow
@pytest.mark.sampled("dtype", list(DTYPES), one_in=4)
def test_a_key_far_away_that_has_all_the_weight_is_seen(dtype):
    q, k, v, _ = arrays(dtype)
    heavy(q, k, v, None)
    exact = truth(q, k, v, STEEP)
    assert (exact.weights[..., 0] > 0.999).all()
    limits = bounds(exact, DTYPES[dtype], 1)
    out, lse = qkv.attention(q, k, v, *STEEP, return_lse=True)
    assert np.abs(out.astype(float) - exact.out).max() <= limits.out
    assert np.abs(lse - exact.lse).max() <= limits.lse


@pytest.mark.slow
@pytest.mark.sampled("dtype", list(DTYPES), one_in=4)
def test_outputs_and_gradients_are_those_of_all_pairs(dtype):
    q, k, v, grad_out = arrays(dtype)
    exact = truth(q, k, v, STEEP)
    limits = bounds(exact, DTYPES[dtype], 1)
    out, pull_back = qkv.vjp(q, k, v, *STEEP, backend="cpu")
    assert np.abs(out.astype(float) - exact.out).max() <= limits.out
    found = pull_back(grad_out)
    wide = [x.astype(float) for x in (q, k, v, grad_out)]
    expected = qkv.vjp(*wide[:3], *STEEP, backend="blocked")[1](wide[3])
    limit = {"float64": 1e-11, "float32": 2e-5}.get(dtype, 3e-2)
    for name in ("query", "key", "value"):
        want = getattr(expected, name)
        assert np.abs(getattr(found, name).astype(float) - want).max() <= limit * np.abs(want).max()


@pytest.mark.parametrize("change", [not_a_key, no_value])
def test_what_is_not_finite_reaches_every_row_that_sees_it(change):
    q, k, v, _ = arrays()
    change(q, k, v, None)
    out = qkv.attention(q, k, v, *STEEP)
    assert not np.isfinite(out[:, :, 5:, 7]).any()
    assert np.isfinite(out[:, :, :5]).all()


@pytest.mark.parametrize("change", [no_cotangent, no_query])
def test_what_is_not_finite_reaches_the_gradient_of_every_key(change):
    q, k, v, grad_out = arrays()
    change(q, k, v, grad_out)
    key = qkv.vjp(q, k, v, *STEEP)[1](grad_out).key
    assert not np.isfinite(key).any()


def test_differences_that_overflow_are_computed():
    """Times a weight of 0 they are NaN."""
    q, k, v, grad_out = arrays()
    grad_out[..., 1300:, :] = v[..., 1000:, :] = 2.1e18
    v[..., :100, :] = -2.1e18
    assert np.isnan(qkv.vjp(q, k, v, *STEEP)[1](grad_out).key[..., :64, :]).all()


@pytest.mark.slow
def test_masked_keys_do_not_outweigh_others():
    q, k, v, _ = arrays()
    blocks = np.tri(LENGTH // 64, k=-9, dtype=bool)  # all or nothing, however wide a tile is
    far = qkv.BlockSparse(blocks, 64, 64)
    exact = truth(q, k, v, (*STEEP, far))
    out = qkv.attention(q, k, v, *STEEP, far)
    assert np.abs(out - exact.out).max() <= bounds(exact, np.float32, 1).out


FORBIDDEN = (qkv.SlidingWindow(999, 0), qkv.ALiBi(np.array(SLOPES)))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e20])
def test_what_a_row_may_not_see_does_not_change_its_bits(value):
    q, k, v, grad_out = arrays()
    out, pull_back = qkv.vjp(q, k, v, *FORBIDDEN)
    d_query = pull_back(grad_out).query
    q[..., 1400, :] = k[..., 1400, :] = v[..., 1400, :] = value
    changed, pull_back = qkv.vjp(q, k, v, *FORBIDDEN)
    np.testing.assert_array_equal(changed[..., :1400, :], out[..., :1400, :])
    now = pull_back(grad_out).query
    np.testing.assert_array_equal(now[..., :1400, :], d_query[..., :1400, :])


def test_blocks_are_looked_for_in_every_call():
    q, k, v, grad_out = arrays()
    for _ in range(4):
        qkv.vjp(q, k, v, *STEEP)[1](grad_out)
        qkv.attention(q, k, v, *STEEP)
    heavy(q, k, v, None)
    out = qkv.attention(q, k, v, *STEEP)
    np.testing.assert_allclose(out, np.broadcast_to(v[:, :, :1], out.shape), atol=1e-6)


def test_nothing_is_prepared_that_depends_on_values():
    q, k, v, grad_out = arrays()
    rows = np.zeros(q.shape[:-1], np.float32)
    inputs = BackwardInputs(out=v, lse=rows, grad_out=grad_out, grad_lse=rows, lse_rest=rows)
    flat = (qkv.ALiBi(1e-3), qkv.Causal())
    for variants, ready in ((flat, True), (STEEP, False)):
        problem = check(q, k, v, variants)
        assert (CpuBackend().prepare(problem, "forward") is not None) == ready
        assert (CpuBackend().prepare(problem, "gradients", inputs=inputs) is not None) == ready


# Problems of every kind

SHAPES = {
    "square": Shape((), 2, 2, 150, 150, 8, 8),
    "grouped": Shape((2,), 4, 2, 100, 400, 24, 16),
    "batches": Shape((2, 2), 3, 1, 70, 300, 16, 32),
}
WAYS = {
    "alibi": lambda s, r: (qkv.ALiBi(2.0),),
    "causal": lambda s, r: (qkv.ALiBi(r.uniform(0.1, 4, s.num_heads)), qkv.Causal()),
    "window": lambda s, r: (qkv.ALiBi(1.5), qkv.SlidingWindow(130, 20)),
    "softcap": lambda s, r: (qkv.Softcap(3.0), qkv.ALiBi(1.0)),
    "capped": lambda s, r: (qkv.ALiBi(1.0), qkv.Softcap(30.0)),
    "rising": lambda s, r: (qkv.ScoreMod(lambda score, b, h, i, j: 0.5 * j + score - i),),
    "lengths": lambda s, r: (
        qkv.KeyLengths(r.integers(1, s.kv_len, s.batch_shape)),
        qkv.ALiBi(2.0),
    ),
    "sinks": lambda s, r: (qkv.ALiBi(2.0), qkv.Sinks(r.normal(size=s.num_heads))),
    "dropout": lambda s, r: (qkv.ALiBi(2.0), qkv.Dropout(0.2, seed=3)),
}


SMALL = pytest.mark.sampled(("way", "shape"), list(product(WAYS, SHAPES)), one_in=27)


def small(way, shape):
    return Case(f"weightless {way} {shape}", SHAPES[shape], WAYS[way], q_offset="end")


@pytest.mark.slow
@SMALL
def test_small_problems(way, shape, always):
    assert check_case("cpu", small(way, shape))


@SMALL
def test_gradients_of_small_problems(way, shape, always):
    inputs = small(way, shape).build("float64")
    grad_out = np.random.default_rng(1).normal(
        size=(*inputs.query.shape[:-1], SHAPES[shape].v_head_dim)
    )
    found, expected = (
        qkv.vjp(*inputs.arrays, *inputs.variants, q_offset="end", backend=backend)[1](grad_out)
        for backend in ("cpu", "blocked")
    )
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), rtol=1e-11, atol=1e-11
        )


def test_a_slope_has_its_gradient(always):
    q, k, v, grad_out = (x.astype(float) for x in arrays(length=300))
    slopes = qkv.ALiBi(np.array([3.0, 4.0]))
    found, expected = (
        qkv.vjp(q, k, v, slopes, backend=backend)[1](grad_out, wrt=(slopes,)).of(slopes)
        for backend in ("cpu", "blocked")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-11)
