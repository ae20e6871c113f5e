"""Neighbouring blocks of queries share copies of K and V; no sum depends on its neighbours."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import qkv
from forced import as_it_runs
from qkv.backends.cpu.passes.forward import ForwardPass
from qkv.problem.building.check import check
from qkv.testing import lay_out, truth
from qkv.testing.tolerances import bounds

Q_LEN, KV_LEN = 300, 333
SEGMENTS = np.repeat([0, 1, 0, 2, 1], [70, 40, 90, 23, 110])
MASK = np.random.default_rng(2).random((Q_LEN, KV_LEN)) < np.linspace(0, 1, Q_LEN)[:, None]
WAYS = {
    "all": (),
    "causal": (qkv.Causal("end"),),
    "window": (qkv.SlidingWindow(37, 5),),
    "lengths": (qkv.KeyLengths([41, 300]),),
    "segments": (qkv.Segments(SEGMENTS[:Q_LEN], SEGMENTS),),
    "mask": (qkv.Mask(MASK),),
    "softcap": (qkv.Causal("end"), qkv.Softcap(2.0)),
}
MEMORY = [
    ("float32", "contiguous"), ("float32", "strided"), ("float16", "contiguous"),
    ("bfloat16", "contiguous"), ("float64", "contiguous"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """Set two threads: more make tasks smaller, and with one a head alone would share keys too."""
    monkeypatch.setenv("QKV_ISA", as_it_runs("avx2"))
    before = qkv.get_num_threads()
    qkv.set_num_threads(2)
    yield
    qkv.set_num_threads(before)


@pytest.mark.sampled(("way", "dtype", "memory"), [(w, *m) for w in WAYS for m in MEMORY], one_in=12)
def test_a_head_gives_the_same_bits_as_among_others(way, dtype, memory) -> None:
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    query, key, value = (
        lay_out(rng.normal(size=(2, 6, n, dim)).astype(kind), memory)
        for n, dim in ((Q_LEN, 24), (KV_LEN, 24), (KV_LEN, 9))
    )
    variants, options = WAYS[way], {"q_offset": "end"}
    shared = ForwardPass(check(query, key, value, variants, **options))
    alone = ForwardPass(check(query[:1, :1], key[:1, :1], value[:1, :1], (), **options))
    assert shared.shape.q_blocks_per_task > alone.shape.q_blocks_per_task == 1
    out, lse = qkv.attention(query, key, value, *variants, **options, return_lse=True)
    exact = truth(query, key, value, variants, **options)
    bound = bounds(exact, dtype)
    assert np.abs(out.astype(float) - exact.out).max() <= bound.out
    for batch in range(2):
        mine = variants
        if way == "lengths":
            mine = (qkv.KeyLengths([(41, 300)[batch]]),)
        for head in (0, 5):
            place = slice(batch, batch + 1), slice(head, head + 1)
            one = [array[place] for array in (query, key, value)]
            own_out, own_lse = qkv.attention(*one, *mine, **options, return_lse=True)
            np.testing.assert_array_equal(own_out, out[place])
            np.testing.assert_array_equal(own_lse, lse[place])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_copies_of_another_head_are_not_taken(dtype) -> None:
    """All keys of each head are one block of keys, of the same numbers."""
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    arrays = [rng.normal(size=(8, n, 16)).astype(kind) for n in (Q_LEN, 40, 40)]
    exact = truth(*arrays)
    out = qkv.attention(*arrays)
    assert np.abs(out.astype(float) - exact.out).max() <= bounds(exact, dtype).out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_are_not_finite_reach_their_own_rows_alone(dtype) -> None:
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    query, key, value = (rng.normal(size=(8, n, 16)).astype(kind) for n in (Q_LEN, KV_LEN, KV_LEN))
    clean = qkv.attention(query, key, value, qkv.Causal("end"))
    value[:, 150, 3] = np.nan
    out = qkv.attention(query, key, value, qkv.Causal("end"))
    rows = np.arange(Q_LEN) + KV_LEN - Q_LEN >= 150
    assert np.isnan(out[:, rows, 3].astype(float)).all()
    out[:, rows, 3] = clean[:, rows, 3]
    np.testing.assert_array_equal(out, clean)
