"""The backward kernel of tiles on the cases of the suite."""

from __future__ import annotations

import numpy as np
import pytest
import test_cases
import test_forbidden

from qkv.testing import Case, cases

DTYPES = ("float32", "float16", "bfloat16")
pytestmark = pytest.mark.usefixtures("tiles", "splits_operands")


PAIRS = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}")
    for case in cases()
    for dtype in DTYPES
    if dtype in case.dtypes
]
HIDING = pytest.mark.sampled("case", test_forbidden.HIDING, one_in=72, ids=lambda case: case.name)


@pytest.mark.slow
@pytest.mark.sampled(("case", "dtype"), PAIRS, one_in=240)
def test_every_gradient(case: Case, dtype: str) -> None:
    test_cases.check_gradients("cpu", case, dtype)


@pytest.mark.slow
@HIDING
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_hidden_keys_and_values(case: Case, poison: float) -> None:
    test_forbidden.test_forbidden_keys_and_values(case, "cpu", poison)


@HIDING
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_blind_queries(case: Case, poison: float) -> None:
    test_forbidden.test_queries_that_may_not_see_a_key(case, "cpu", poison)
