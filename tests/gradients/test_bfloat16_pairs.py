"""Gradients by instructions that multiply pairs of bfloat16, and by BFMMLA, which multiplies quads.

Pairs and quads are of queries, of keys and of elements of a row.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gradient_errors import errors

import qkv
from forced import as_it_runs

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=[as_it_runs(isa) for isa in ("avx512-bf16", "neon-bf16")])
def isa(request, monkeypatch) -> str:
    monkeypatch.setenv("QKV_ISA", request.param)
    return request.param


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(BFLOAT16)


def problem(heads, kv_heads, q_len, kv_len, dim, v_dim):
    """Query, key, value and dO."""
    shapes = (heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, v_dim)
    arrays = [normal(*shape, seed=n) for n, shape in enumerate(shapes)]
    return *arrays, normal(heads, q_len, v_dim, seed=3)


def gradients(query, key, value, grad_out, *variants, backend="cpu"):
    _, pullback = qkv.vjp(query, key, value, *variants, q_offset=0, backend=backend)
    found = pullback(grad_out)
    return [each.astype(np.float32) for each in (found.query, found.key, found.value)]


SIZES = {
    "rows read as they lie": (4, 2, 40, 130, 64, 24),
    "rows copied": (2, 1, 50, 301, 34, 65),
    "halves of a row that end within a quad": (1, 1, 64, 64, 12, 12),
    "one query in the last block, few keys": (2, 2, 33, 6, 130, 8),
    "rows shorter than a quad": (1, 1, 61, 3, 1, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("variants", [(), (qkv.Causal("end"),)], ids=["all", "causal"])
def test_sizes_that_leave_something_over(isa, name, variants) -> None:
    *arrays, grad_out = problem(*SIZES[name])
    found = errors(arrays, grad_out, "bfloat16", variants)
    assert (found.shares <= 1).all(), found.shares


@pytest.mark.slow
def test_keys_that_some_vectors_of_queries_do_not_see(isa) -> None:
    *arrays, grad_out = problem(2, 1, 150, 150, 40, 24)
    found = errors(arrays, grad_out, "bfloat16", (qkv.SlidingWindow(9, 0),))
    assert (found.shares <= 1).all(), found.shares


def test_what_is_forbidden_changes_no_bit(isa) -> None:
    """Two documents meet within a block of queries and within a quad of keys."""
    arrays = problem(2, 1, 101, 101, 24, 20)
    documents = np.repeat([0, 1], [42, 59])
    before = gradients(*arrays, qkv.Segments(documents))
    assert all(np.isfinite(each).all() for each in before)
    for poison in (np.nan, np.inf):
        changed = [array.copy() for array in arrays]
        for array in changed:
            array[:, 43::9, ::3] = poison
        after = gradients(*changed, qkv.Segments(documents))
        for old, new in zip(before, after, strict=True):
            assert old[:, :42].tobytes() == new[:, :42].tobytes()
            assert not np.isfinite(new[:, 43::9]).all()


def test_an_infinite_cotangent_of_the_last_query(isa) -> None:
    """The last block has one query. In place of the others nothing is multiplied by infinity."""
    arrays = problem(1, 1, 33, 20, 16, 16)
    arrays[3][0, -1, 5] = np.inf
    _, _, of_values = gradients(*arrays)
    assert np.isposinf(of_values[..., 5]).all()
    assert np.isfinite(np.delete(of_values, 5, axis=-1)).all()
