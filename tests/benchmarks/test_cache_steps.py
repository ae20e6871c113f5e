"""The benchmark of steps over caches: every cache is checked, and a wrong output is not timed."""

import re

import numpy as np
import pytest

from benchmarks.cache_steps import worker
from benchmarks.cache_steps.__main__ import main


@pytest.mark.slow
def test_the_table_has_every_cache(capsys) -> None:
    assert main(["--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split("|")[1:4] == [" cache ", " qkv ", " qkv, tensors "]
    cells = [line.split("|")[1:-1] for line in lines[4:]]
    kinds = "contiguous", "paged", "rolling"
    expected = [
        f"{kind}{stored}{lengths}"
        for kind in kinds
        for stored in ("", " int8")
        for lengths in ("", ", sequences")
    ]
    assert [name.strip() for name, *_ in cells] == expected
    assert all(re.fullmatch(r" \d+ ", time) for _, *times in cells for time in times[:2])


@pytest.mark.parametrize("name", ["paged", "paged int8"])
def test_a_wrong_output_is_not_timed(name) -> None:
    class Wrong:
        def begin(self, key, value, lengths):
            pass

        def step(self, query, key, value):
            return value

    with pytest.raises(ValueError, match=f"{name} is off by"):
        worker._steps(Wrong(), name, lambda array: array)


def test_the_reference_is_the_definition() -> None:
    """Sequences of one and two tokens, to each of which one was appended: means of values."""
    query = np.zeros((2, 1, 1, worker.DIM))
    key = np.ones((2, 1, 3, worker.DIM))
    value = np.arange(6.0).reshape(2, 1, 3, 1) * np.ones(worker.DIM)
    out = worker._from_the_definition(query, key, value, np.array([1, 2]), 1)
    np.testing.assert_allclose(out[:, 0, 0, 0], [(0 + 2) / 2, (3 + 4 + 5) / 3])


def test_bad_options_are_refused(capsys) -> None:
    assert main(["--rounds", "0"]) == 2
    assert "--rounds is 0" in capsys.readouterr().err


@pytest.mark.parametrize("front", worker.FRONTS)
def test_every_step_of_a_front_end_is_checked(monkeypatch, front) -> None:
    monkeypatch.setattr(worker, "STEPS", 4)
    times = worker.measured(front)
    assert len(times) == (12 if front.startswith("qkv") else 1)
    assert min(times.values()) > 0
