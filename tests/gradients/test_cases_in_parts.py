"""The backward kernel of tiles on the cases of the suite: a sample, or all with `--every-case`."""

from __future__ import annotations

import numpy as np
import pytest
import test_cases
import test_forbidden

from qkv.testing import Case, cases

DTYPES = ("float32", "float16", "bfloat16")
pytestmark = pytest.mark.usefixtures("in_parts")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("every_case")
    if "dtype" in metafunc.fixturenames:
        pairs = [(case, dtype) for case in cases() for dtype in DTYPES if dtype in case.dtypes]
        names = "case", "dtype"
        chosen = [pytest.param(case, dtype, id=f"{case.name}-{dtype}") for case, dtype in pairs]
        metafunc.parametrize(names, chosen if every else chosen[::19])
    elif "case" in metafunc.fixturenames:
        hiding = [case for case in cases() if test_forbidden.hides(case)]
        metafunc.parametrize("case", hiding if every else hiding[::9], ids=lambda c: c.name)


def test_every_gradient(case: Case, dtype: str) -> None:
    test_cases.test_gradients("cpu", case, dtype)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_hidden_keys_and_values(case: Case, poison: float) -> None:
    test_forbidden.test_forbidden_keys_and_values(case, "cpu", poison)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_blind_queries(case: Case, poison: float) -> None:
    test_forbidden.test_queries_that_may_not_see_a_key(case, "cpu", poison)
