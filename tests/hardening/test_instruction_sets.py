"""The conformance suite on every instruction set that runs here, with one thread and with two.

A sample of the cases; `--every-case` for all of them.
"""

from collections.abc import Iterator
from itertools import product

import pytest
from forced import instruction_sets, kernels, takes

import qkv
from qkv.backends.cpu import forward_pass
from qkv.testing import Case, cases, check_case

PAIRS = [(case, dtype) for case in cases() for dtype in case.dtypes]
SAMPLE = 101
"""Every such pair of a case and a dtype, other ones for each way to run it."""


@pytest.fixture
def every_tile_a_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The cases are small, and one thread would do them all."""
    monkeypatch.setattr(forward_pass, "_WORTH_A_THREAD", 1.0)
    yield
    qkv.set_num_threads(None)


def ways(whole: bool) -> Iterator[tuple[str, int, Case, str]]:
    for n, (isa, threads) in enumerate(product(kernels(), (1, 2))):
        for case, dtype in PAIRS if whole else PAIRS[10 * n :: SAMPLE]:
            if takes(isa, dtype):
                yield isa, threads, case, dtype


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize(
            ("isa", "threads", "case", "dtype"),
            [
                pytest.param(isa, threads, case, dtype, id=f"{isa}-{threads}-{case.name}-{dtype}")
                for isa, threads, case, dtype in ways(metafunc.config.getoption("every_case"))
            ],
            indirect=["isa"],
        )


@pytest.mark.usefixtures("every_tile_a_thread")
def test_conformance(isa: str, threads: int, case: Case, dtype: str) -> None:
    qkv.set_num_threads(threads)
    assert check_case("cpu", case, dtype)


def test_the_sample_has_every_dtype_on_each() -> None:
    for isa in instruction_sets():
        sampled = {(case.shape, dtype) for i, _, case, dtype in ways(False) if i == isa}
        assert len({dtype for _, dtype in sampled}) == 4
        assert len(sampled) >= 10
