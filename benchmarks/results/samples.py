"""Medians and ratios.

The rate of a machine that others share changes from second to second. Whatever is divided is
therefore divided within one round, in which both were measured a moment apart; then the median over
rounds is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks.results.record import Entry, Result

__all__ = ["Summary", "medians", "ratio", "spread", "summary"]


def medians(entry: Entry) -> dict[int, float]:
    """Seconds of a call in each round."""
    return {turn.round: median(turn.seconds) for turn in entry.turns if turn.seconds}


def ratio(lead: Entry, other: Entry) -> float | None:
    """How many times longer the other takes: the median over the rounds that both have.

    For memory, how many times more it takes.
    """
    if lead.extra_bytes is not None and other.extra_bytes is not None:
        return other.extra_bytes / lead.extra_bytes if lead.extra_bytes else None
    own, theirs = medians(lead), medians(other)
    both = [theirs[r] / own[r] for r in own if r in theirs]
    return median(both) if both else None


def spread(values: list[float]) -> float:
    """Largest less smallest, as a share of the median."""
    return (max(values) - min(values)) / median(values) if values else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """One contender at one workload in four numbers.

    Attributes
    ----------
    seconds : float
        The median over rounds of the median of a round.
    rate : float
        Work for each second: operations, or bytes.
    share : float or None
        Of the ceiling measured just before, the median over rounds.
    spread : float
        Between rounds.
    """

    seconds: float
    rate: float
    share: float | None
    spread: float


def summary(result: Result, entry: Entry) -> Summary | None:
    """None if there are no times."""
    rounds = medians(entry)
    if not rounds:
        return None
    seconds = median(rounds.values())
    shares = [
        result.work / rounds[turn.round] / turn.ceiling
        for turn in entry.turns
        if turn.round in rounds and turn.ceiling
    ]
    return Summary(
        seconds,
        result.work / seconds,
        median(shares) if shares else None,
        spread(list(rounds.values())),
    )
