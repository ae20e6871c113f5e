"""Gradients of every case, on every backend, against PyTorch's derivative of the formula."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from formula import TYPES, Dense, ulp

import qkv
from qkv.testing import DTYPES, Case, cases

BACKENDS = ("cpu", "blocked", "reference")
ORDERS = 12
WITH_ARRAYS = (qkv.Bias, qkv.ALiBi, qkv.RelativeBias, qkv.Softcap, qkv.Sinks)
PAIRS = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}")
    for case in cases()
    for dtype in case.dtypes
]


def own_arrays(case: Case, dtype: str) -> list[int]:
    """Which variants have arrays that a gradient can be asked of."""
    variants = case.build(dtype).variants
    bare = [qkv.Bias(v) if isinstance(v, np.ndarray) and v.dtype != bool else v for v in variants]
    return [
        n
        for n, v in enumerate(bare)
        if isinstance(v, WITH_ARRAYS)
        and not (isinstance(v, qkv.ALiBi) and v.slopes is None)
        and not (isinstance(v, qkv.Bias) and 0 in np.asarray(v.array).strides)
    ]


def cotangents(case: Case, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    truth = case.truth(dtype)
    rng = np.random.default_rng(7)
    grad_out = rng.normal(size=truth.out.shape).astype(DTYPES[dtype])
    compute = np.float64 if dtype == "float64" else np.float32
    return grad_out, rng.normal(size=truth.lse.shape).astype(compute)


@lru_cache(maxsize=4)
def expected(case: Case, dtype: str) -> tuple[list[np.ndarray], list[float]]:
    """Gradients in float64, and how far a result may be from them."""
    arrays = [case.plain_order(a) for a in case.build(dtype).arrays]
    truth, own = case.truth(dtype), own_arrays(case, dtype)
    grad_out, grad_lse = cotangents(case, dtype)

    def run(kind: str, order: int = 0) -> list[np.ndarray]:
        dense = Dense(*arrays, truth, case.scale, TYPES[kind], order)
        return dense.gradients(grad_out, grad_lse, own)

    exact = run("float64")
    largest = [np.max(np.abs(g), initial=0.0) for g in exact]
    if dtype == "float64":
        return exact, [64 * 2.0**-52 * max(1.0, size) for size in largest]
    errors = [0.0] * len(exact)
    for order in range(ORDERS):
        for n, (plain, right) in enumerate(zip(run(dtype, order), exact, strict=True)):
            errors[n] = max(errors[n], np.max(np.abs(plain - right), initial=0.0))
    return exact, [3 * e + 3 * ulp(m, dtype) for e, m in zip(errors, largest, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sampled(("case", "dtype"), PAIRS, one_in=144)
def test_gradients(backend: str, case: Case, dtype: str, request: pytest.FixtureRequest) -> None:
    check_gradients(backend, case, dtype)
    if backend == "cpu":
        request.getfixturevalue("masks_of_few_pairs_are_read")
        check_gradients(backend, case, dtype)


def check_gradients(backend: str, case: Case, dtype: str) -> None:
    inputs = case.build(dtype)
    grad_out, grad_lse = cotangents(case, dtype)
    shown = case.arrange(grad_out) if case.memory not in ("broadcast", "repeated") else grad_out
    if case.memory in ("broadcast", "repeated") and case.layout == "blhd":
        shown = grad_out.swapaxes(-3, -2)
    rows = grad_lse if case.head_axis else grad_lse[0]
    _, pullback = qkv.vjp(*inputs.arrays, *inputs.variants, backend=backend, **inputs.keywords)
    wanted = [inputs.variants[n] for n in own_arrays(case, dtype)]
    found = pullback(shown, rows, wrt=wanted)
    exact, limits = expected(case, dtype)
    operands = found.query, found.key, found.value
    for got, given in zip(operands, inputs.arrays, strict=True):
        assert got.shape == given.shape
        assert got.dtype == given.dtype
    results: list[Any] = [case.plain_order(g) for g in operands]
    results += [found.of(variant) for variant in wanted]
    names = ["query", "key", "value", *map(repr, wanted)]
    for name, got, right, limit in zip(names, results, exact, limits, strict=True):
        error = np.max(np.abs(got.astype(np.float64) - right), initial=0.0)
        # A variant's array may be of another type than the operands, and so is its gradient.
        limit += ulp(float(np.max(np.abs(right), initial=0.0)), got.dtype.name) / 2
        assert error <= limit, f"{name} is {error:.3g} off, allowed is {limit:.3g}"
