"""Rows of a single key: lse is the score, in which a sum of products is all the error there is."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import qkv
from forced import instruction_sets
from qkv.testing import DTYPES, bounds, truth

Array = np.ndarray[Any, Any]

PROBLEMS = 25
KINDS = ("nothing", "bias", "softcap")
SIZES = list(product([1, 13, 40], [64, 257]))
"""Numbers of queries, few and many, each with a head_dim."""


def problem(seed: int, q_len: int, head_dim: int, dtype: str) -> tuple[list[Array], Array]:
    """Query, key and value, and a float32 bias; every other problem has large scores."""
    rng = np.random.default_rng([seed, q_len, head_dim])
    sizes = (q_len, head_dim), (1, head_dim), (1, 8)
    query, key, value = (rng.normal(size=(1, *size)) for size in sizes)
    query = query * (1, 10)[seed % 2]
    arrays = [array.astype(DTYPES[dtype]) for array in (query, key, value)]
    return arrays, rng.normal(size=(q_len, 1)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(4)
def test_lse(kind: str, dtype: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """BLAS adds up a product with a single key in many lanes, so its plain error is small."""
    monkeypatch.setenv("QKV_ISA", isa)
    for (q_len, head_dim), seed in product(SIZES, range(PROBLEMS)):
        arrays, bias = problem(seed, q_len, head_dim, dtype)
        variants = {"nothing": (), "bias": (qkv.Bias(bias),), "softcap": (qkv.Softcap(20.0),)}[kind]
        exact = truth(*arrays, variants)
        _, lse = qkv.attention(*arrays, *variants, return_lse=True, backend="cpu")
        share = np.abs(np.float64(lse) - exact.lse).max() / bounds(exact, dtype).lse
        assert share <= 1, f"{q_len} queries, {head_dim}, problem {seed}: {share:.2f} of the bound"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 13, 40])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.one_in(4)
def test_the_weight_is_one(q_len: int, dtype: str, masked: bool) -> None:
    """Scores are the same numbers in the backward pass and in a replay, so that none is off."""
    (query, key, value), _ = problem(1, q_len, 257, dtype)
    variants = (qkv.SlidingWindow(20, 0),) if masked else ()
    seeing = min(q_len, 21) if masked else q_len
    out, pullback = qkv.vjp(query, key, value, *variants, q_offset="start", backend="cpu")
    found = pullback(np.ones_like(out))
    assert (out[:, :seeing] == value).all()
    assert (found.value == seeing).all()
    assert not found.query.any()
    assert not found.key.any()
    record = qkv.inspect(query, key, value, *variants, q_offset="start", backend="cpu")
    assert (record.max_weight[:, :seeing] == 1).all()
    assert not record.entropy.any()
    if q_len > 12:  # The order of additions of few queries is another in a replay.
        assert (record.received == seeing).all()
