"""The same bits whatever the number of threads, and every time."""

from functools import partial
from itertools import cycle

import numpy as np
import pytest
from fuzz import random_case

import qkv
from forced import sampled_kernels, takes
from qkv.problem.building.builder import Shape
from qkv.testing import DTYPES, Case
from sampling import sample

THREADS = (1, 2, 3, 5)
REPEATS = 40


pytestmark = pytest.mark.usefixtures("every_task_a_thread")


def blocks(name: str, dtype: str, q_len: int, *variants: object) -> Case:
    """More tasks than threads: query blocks, chunks of keys, heads."""
    shape = Shape((2,), 4, 2, q_len, 1300, 24, 20)
    return Case(f"{name} {dtype}", shape, lambda s, r: variants, q_offset="end", dtypes=(dtype,))


MIXED = [
    *(blocks("prefill", dtype, 200, qkv.Causal(), qkv.ALiBi()) for dtype in DTYPES),
    *(blocks("decode", dtype, 2, qkv.Softcap(5.0)) for dtype in DTYPES),
    blocks("dropped", "float32", 130, qkv.Dropout(0.3, 11), qkv.SlidingWindow(90, None)),
    *(random_case(2, structure, 0) for structure in range(8)),
]
FEW = MIXED[::3]


def results(case: Case) -> bytes:
    (dtype,) = case.dtypes
    call = case.build(dtype)
    spoil(case)
    out, lse = qkv.attention(
        *call.arrays, *call.variants, backend="cpu", return_lse=True, **call.keywords
    )
    return out.tobytes() + lse.tobytes()


def gradients(case: Case) -> bytes:
    (dtype,) = case.dtypes
    call = case.build(dtype)
    spoil(case)
    out, pullback = qkv.vjp(*call.arrays, *call.variants, backend="cpu", **call.keywords)
    grad_out = np.random.default_rng(0).normal(size=out.shape).astype(out.dtype)
    found = pullback(grad_out)
    return b"".join(g.tobytes() for g in (found.query, found.key, found.value))


def spoil(case: Case) -> None:
    """Memory that results may be made in, full of NaN."""
    s = case.shape
    for dim in (s.head_dim, s.v_head_dim):
        np.full((*s.scores[:-1], dim), np.nan)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """More cases on the best instruction set, and in parts, than on each other."""
    if "isa" not in metafunc.fixturenames:
        return
    if "case" not in metafunc.fixturenames:
        some = sample(metafunc.config, sampled_kernels(metafunc.config), 2)
        metafunc.parametrize("isa", some, indirect=True)
        return
    gradients = metafunc.function is test_threads_of_gradients
    cases, known = (FEW if gradients else MIXED), sampled_kernels(metafunc.config)
    many, few = (sample(metafunc.config, cases, one_in) for one_in in (8, 17))
    metafunc.parametrize(
        ("isa", "case"),
        [
            pytest.param(isa, case, id=f"{isa}-{case.name}")
            for n, isa in enumerate(known)
            for case in (many if n == 0 or "parts" in isa else few)
            if takes(isa, case.dtypes[0])
        ],
        indirect=["isa"],
    )


@pytest.mark.slow
def test_threads(isa: str, case: Case) -> None:
    found = []
    for number in (*THREADS, *THREADS):
        qkv.set_num_threads(number)
        found.append(results(case))
    assert len(set(found)) == 1


@pytest.mark.slow
def test_threads_of_gradients(isa: str, case: Case) -> None:
    found = []
    for number in THREADS:
        qkv.set_num_threads(number)
        found.append(gradients(case))
    assert len(set(found)) == 1


@pytest.mark.slow
def test_repeats() -> None:
    """Problems in turns, so that each finds the memory, the workers and the caches of another."""
    jobs = [partial(results, case) for case in MIXED[::2]]
    jobs += [partial(gradients, case) for case in FEW[::2]]
    first = [job() for job in jobs]
    number = cycle(THREADS)
    for repeat in range(REPEATS):
        n = (7 * repeat) % len(jobs)
        qkv.set_num_threads(next(number))
        assert jobs[n]() == first[n], str(jobs[n])


@pytest.mark.slow
def test_one_problem_many_times(isa: str) -> None:
    for case in MIXED[1:6:2]:
        first = results(case)
        for repeat in range(REPEATS):
            qkv.set_num_threads(THREADS[repeat % len(THREADS)])
            assert results(case) == first, case.name
