"""Two runs beside each other."""

from __future__ import annotations

from benchmarks.results.record import Entry, Result, Run
from benchmarks.results.samples import summary
from benchmarks.results.tables import three_digits

__all__ = ["COLUMNS", "rows"]

COLUMNS = ("workload", ">ms", ">then", ">of peak", ">then", ">faster", ">noise")


def rows(before: Run, after: Run) -> list[tuple[str, ...]]:
    """One row for each contender that both runs timed.

    "faster" divides shares of the peak, since the two runs met the machine at different moments;
    without a peak, seconds. "noise" is the larger spread between rounds of either.
    """
    earlier = {result.workload: result for result in before.results}
    found = []
    for result in after.results:
        if result.workload not in earlier:
            continue
        of = {entry.contender: entry for entry in earlier[result.workload].entries}
        for entry in result.entries:
            if entry.contender in of:
                row = _row(earlier[result.workload], of[entry.contender], result, entry)
                found += [row] if row else []
    return found


def _row(old: Result, was: Entry, new: Result, now: Entry) -> tuple[str, ...] | None:
    a, b = summary(old, was), summary(new, now)
    if a is None or b is None:
        return None
    faster = b.share / a.share if a.share and b.share else a.seconds / b.seconds
    shares = ["" if x.share is None else f"{x.share:.0%}" for x in (a, b)]
    name = new.workload if now.contender == "qkv" else f"{new.workload} ({now.contender})"
    return (
        name,
        three_digits(a.seconds * 1e3),
        three_digits(b.seconds * 1e3),
        *shares,
        f"{faster:.2f}",
        f"{max(a.spread, b.spread):.0%}",
    )
