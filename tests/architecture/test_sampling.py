"""Samples of a suite: every case is in one of them, and a test that is named is always there."""

from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from sampling import SLOW_TESTS_ONE_IN, is_turn_of, sample

CASES = list(range(50))


def config(seed=0, every_case=False, args=("tests",)):
    options = {"sample_seed": seed, "every_case": every_case}
    place = SimpleNamespace(dir=Path("/x"))
    return SimpleNamespace(getoption=options.__getitem__, args=list(args), invocation_params=place)


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


def slow(name, **options):
    nodeid = f"tests/test_x.py::{name}"
    path = Path("/x/tests/test_x.py").resolve()
    return is_turn_of(SimpleNamespace(config=config(**options), nodeid=nodeid, path=path))


@pytest.mark.parametrize("first", [0, 1, 337722])
def test_a_slow_test_is_in_one_of_several_runs(first) -> None:
    seeds = range(first * SLOW_TESTS_ONE_IN, (first + 1) * SLOW_TESTS_ONE_IN)
    turns = [[slow(f"test_{i}", seed=seed) for seed in seeds] for i in range(200)]
    assert all(sum(each) == 1 for each in turns)
    shares = [sum(run) * len(seeds) / len(turns) for run in zip(*turns, strict=True)]
    assert min(shares) > 0.5
    assert max(shares) < 2


@pytest.mark.parametrize("one_in", [2, 3, 4, 12, 24, 240])
def test_every_case_of_a_sampled_suite_that_is_slow_has_its_turn(one_in) -> None:
    for rest in range(one_in):
        seeds = range(2026000 + rest, 2026000 + 16 * SLOW_TESTS_ONE_IN * one_in, one_in)
        assert any(slow(f"test_3[{rest}]", seed=seed) for seed in seeds)


def test_slow_tests_on_request() -> None:
    for options in (
        {"every_case": True},
        {"args": ["tests/test_x.py"]},
        {"args": ["tests/test_y.py", "/x/tests/test_x.py::test_3"]},
    ):
        assert all(slow(f"test_{i}", **options) for i in range(20))
    assert not all(slow(f"test_{i}", args=["tests/test_y.py"]) for i in range(20))
