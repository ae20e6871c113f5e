"""The conformance suite on every instruction set, real or emulated, with one or two threads."""

from collections.abc import Iterator
from itertools import product

import pytest

import qkv
from forced import sampled_kernels, takes
from qkv.testing import DTYPES, Case, cases, check_case
from sampling import sample


def ways(config: pytest.Config) -> Iterator[tuple[str, int, Case, str]]:
    """A sample for each instruction set and dtype."""
    for isa, dtype in product(sampled_kernels(config), DTYPES):
        if takes(isa, dtype):
            of_dtype = [case for case in cases() if dtype in case.dtypes]
            for threads, case in sample(config, list(product((1, 2), of_dtype)), 1000):
                yield isa, threads, case, dtype


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize(
            ("isa", "threads", "case", "dtype"),
            [
                pytest.param(isa, threads, case, dtype, id=f"{isa}-{threads}-{case.name}-{dtype}")
                for isa, threads, case, dtype in ways(metafunc.config)
            ],
            indirect=["isa"],
        )


@pytest.mark.usefixtures("every_task_a_thread")
def test_conformance(
    isa: str, threads: int, case: Case, dtype: str, request: pytest.FixtureRequest
) -> None:
    qkv.set_num_threads(threads)
    assert check_case("cpu", case, dtype)
    request.getfixturevalue("masks_of_few_pairs_are_read")
    assert check_case("cpu", case, dtype)


def test_the_sample_has_every_dtype_on_each(pytestconfig: pytest.Config) -> None:
    for isa in sampled_kernels(pytestconfig):
        wanted = {dtype for dtype in DTYPES if takes(isa, dtype)}
        assert {dtype for i, _, _, dtype in ways(pytestconfig) if i == isa} == wanted
