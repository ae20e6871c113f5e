"""Samples of a suite: every case is in one of them, and a test that is named is always there."""

from itertools import chain, pairwise
from types import SimpleNamespace

import pytest

from sampling import sample

CASES = list(range(50))


def config(seed=0, every_case=False, args=("tests",)):
    options = {"sample_seed": seed, "every_case": every_case}
    return SimpleNamespace(getoption=options.__getitem__, args=list(args))


@pytest.mark.parametrize("one_in", [1, 3, 7, 50, 80])
@pytest.mark.parametrize("first", [0, 4, 2026327])
def test_seeds_that_follow_one_another_take_every_case_once(one_in, first) -> None:
    count = min(one_in, len(CASES))
    samples = [sample(config(first + n), CASES, one_in) for n in range(count)]
    assert sorted(chain(*samples)) == CASES
    assert max(map(len, samples)) - min(map(len, samples)) <= 1
    assert all(part == sorted(part) for part in samples)


def test_a_sample_is_no_regular_grid() -> None:
    """Cases of one type may lie at regular distances."""
    part = sample(config(), CASES, 5)
    assert len({b - a for a, b in pairwise(part)}) > 2


def test_all_cases_on_request() -> None:
    assert sample(config(every_case=True), CASES, 7) == CASES
    assert sample(config(args=["tests/test_x.py::test_y[3]"]), CASES, 7) == CASES
    assert sample(config(), [], 7) == []
