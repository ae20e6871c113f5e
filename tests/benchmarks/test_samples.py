"""Medians and ratios, on numbers small enough to follow."""

from __future__ import annotations

import pytest

from benchmarks.results.record import Entry, Result, Turn
from benchmarks.results.samples import medians, ratio, spread, summary


def entry(name: str, *rounds: tuple[float, ...], ceiling: float | None = 100.0) -> Entry:
    turns = [Turn(i, ceiling, list(seconds)) for i, seconds in enumerate(rounds)]
    return Entry(name, "1", "timed", turns=turns)


def result(*entries: Entry, work: int = 60) -> Result:
    return Result("w", "a workload", "time", work, "operations", "peak", list(entries))


def test_a_round_counts_by_its_median_call() -> None:
    assert medians(entry("a", (1.0, 9.0, 2.0), (4.0, 6.0))) == {0: 2.0, 1: 5.0}


def test_ratios_are_taken_within_a_round() -> None:
    """The machine slows down tenfold in round 1 and 2; the other always takes twice as long."""
    lead, other = entry("a", (1.0,), (10.0,), (12.0,)), entry("b", (2.0,), (20.0,), (24.0,))
    assert ratio(lead, other) == 2.0
    # A quotient of medians over different rounds would say 20 / 10.5.
    other.turns.pop()
    lead.turns.pop(0)
    assert ratio(lead, other) == 2.0


def test_no_common_round_is_no_ratio() -> None:
    lead, other = entry("a", (1.0,)), entry("b", (2.0,))
    other.turns[0] = Turn(5, None, [2.0])
    assert ratio(lead, other) is None


def test_memory_is_compared_by_bytes() -> None:
    lead = Entry("a", "1", "timed", extra_bytes=4)
    assert ratio(lead, Entry("b", "1", "timed", extra_bytes=10)) == 2.5
    assert ratio(Entry("a", "1", "timed", extra_bytes=0), lead) is None


def test_a_share_is_of_the_peak_of_its_own_moment() -> None:
    """60 operations in 1 s of 100, in 2 s of 40, in 3 s of 25: shares .6, .75, .8."""
    one = entry("a", (1.0,), (2.0,), (3.0,))
    one.turns[1] = Turn(1, 40.0, [2.0])
    one.turns[2] = Turn(2, 25.0, [3.0])
    found = summary(result(one), one)
    assert found is not None
    assert (found.seconds, found.rate) == (2.0, 30.0)
    assert found.share == pytest.approx(0.75)
    assert found.spread == 1.0


def test_without_a_peak_there_is_no_share() -> None:
    one = entry("a", (1.0,), ceiling=None)
    found = summary(result(one), one)
    assert found is not None
    assert found.share is None


def test_without_times_there_is_no_summary() -> None:
    wrong = Entry("a", "1", "wrong")
    assert summary(result(wrong), wrong) is None
    assert spread([]) == 0.0
