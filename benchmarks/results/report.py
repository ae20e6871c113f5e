"""A run as lines and cells, which the terminal and Markdown draw each in its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.latency import report as latency_report
from benchmarks.latency import session as latency_session
from benchmarks.models import report as models_report
from benchmarks.models import session as models_session
from benchmarks.results.record import Entry, Result, Run
from benchmarks.results.samples import ratio, spread, summary
from benchmarks.results.tables import Table, three_digits
from benchmarks.results.tables import markdown as table_lines
from qkv.ledger import memory

__all__ = [
    "COLUMNS",
    "DETAIL_COLUMNS",
    "details",
    "headline",
    "markdown",
    "notes",
    "page",
    "rows",
    "tables",
]

COLUMNS = ("workload", ">rate", ">of peak", ">ms", "times as long, or as much")
DETAIL_COLUMNS = ("contender", ">ms", ">rate", ">of peak", ">ratio", ">spread", ">error/bound")

_BUSY_LOAD = 0.3
"""Load of others, for each core, above which a machine is not quiet."""
_UNSTEADY = 0.1
"""Spread of the peak between turns of one workload from which a machine is not steady."""


@dataclass(frozen=True, slots=True)
class _Cells:
    rate: str
    share: str
    time: str


def tables(run: Run) -> list[Table]:
    """The tables of a run of any kind, plain, `--latency` or `--models`."""
    kind = run.settings.get("kind")
    if kind == latency_session.KIND:
        return latency_report.tables(run)
    if kind == models_session.KIND:
        return models_report.tables(run)
    return [Table("", COLUMNS, rows(run))]


def rows(run: Run) -> list[tuple[str, ...]]:
    """One row for each workload: the leading contender, and the others as ratios to it."""
    return [_row(result) for result in run.results]


def _row(result: Result) -> tuple[str, ...]:
    lead, *others = result.entries
    cells = _cells(result, lead)
    name = result.workload if lead.contender == "qkv" else f"{result.workload} ({lead.contender})"
    against = []
    for other in others:
        times, alone = ratio(lead, other), summary(result, other)
        if times is not None:
            against.append(f"{other.contender} {times:.2f}")
        elif alone is not None:
            against.append(f"{other.contender} {three_digits(alone.seconds * 1e3)} ms")
        elif other.state == "wrong":
            against.append(f"{other.contender} wrong")
    return name, cells.rate, cells.share, cells.time, ", ".join(against)


def _cells(result: Result, entry: Entry) -> _Cells:
    if entry.extra_bytes is not None:
        return _Cells(f"{memory(entry.extra_bytes)} more", "", "")
    found = summary(result, entry)
    if found is None:
        return _Cells(entry.state, "", "")
    unit = "GB/s" if result.unit == "bytes" else "GFLOP/s"
    share = "" if found.share is None else f"{found.share:.0%}"
    return _Cells(f"{found.rate / 1e9:.0f} {unit}", share, three_digits(found.seconds * 1e3))


def details(result: Result) -> list[tuple[str, ...]]:
    """One row for each contender of a workload."""
    lead = result.entries[0]
    return [_detail(result, lead, entry) for entry in result.entries]


def _detail(result: Result, lead: Entry, entry: Entry) -> tuple[str, ...]:
    cells, times, found = _cells(result, entry), ratio(lead, entry), summary(result, entry)
    checked = entry.error is not None and entry.bound
    return (
        entry.contender,
        cells.time,
        cells.rate,
        cells.share,
        "" if times is None else f"{times:.2f}",
        "" if found is None else f"{found.spread:.0%}",
        f"{(entry.error or 0) / entry.bound:.2f}" if checked and entry.bound else "",
    )


def notes(run: Run) -> list[str]:
    """Who was not timed, and why; each reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in run.results:
        for entry in result.entries:
            if entry.state != "timed":
                key = (f"{entry.contender} {entry.state}", entry.detail)
                found.setdefault(key, []).append(result.workload)
    return [f"{who}: {why} ({_shortened(where)})" for (who, why), where in found.items()]


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"


def headline(run: Run) -> list[str]:
    """The machine, the versions, and whether both were quiet."""
    machine = run.machine
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    peaks = [_rate(name, value) for name, value in machine["peaks"].items()]
    threads, rounds = run.settings["threads"], run.settings["rounds"]
    return [
        f"{machine['processor']}, {machine['isa']}, {threads} threads of {machine['cores']}",
        f"{machine['system']}, Python {machine['python']}, qkv {machine['qkv']}, {packages}",
        *([f"Peaks: {', '.join(peaks)}"] if peaks else []),
        f"{rounds} rounds in turns, beside {', '.join(_limits_in_words(run)) or 'no peak'}",
        _quiet(run),
    ]


def _limits(run: Run) -> dict[tuple[str, str], list[list[float]]]:
    """What each ceiling measured, by workload."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for result in run.results:
        seen = [turn.ceiling for e in result.entries for turn in e.turns if turn.ceiling]
        if seen and result.ceiling:
            found.setdefault((result.ceiling, result.unit), []).append(seen)
    return found


def _limits_in_words(run: Run) -> list[str]:
    return [
        _rate(name, median(value for values in seen for value in values))
        for (name, _), seen in _limits(run).items()
    ]


def _rate(name: str, value: float) -> str:
    return f"{name} {value / 1e9:.0f} {'GB/s' if name.startswith('memory') else 'GFLOP/s'}"


def _quiet(run: Run) -> str:
    """Memory is told apart: others may be at it where nobody is at these cores."""
    moved: dict[str, float] = {}
    for (_, unit), seen in _limits(run).items():
        moved[unit] = max([moved.get(unit, 0.0), *map(spread, seen)])
    memory_moved = moved.pop("bytes", 0.0)
    worst, busy = max(moved.values(), default=0.0), run.load[0] / max(run.machine["cores"] or 1, 1)
    name = "Not a quiet machine"
    if busy <= _BUSY_LOAD and worst <= _UNSTEADY:
        steady = memory_moved <= _UNSTEADY
        name = "A quiet machine" if steady else "A quiet machine but for its memory"
    facts = [f"load {run.load[0]:.2f} before"]
    if moved:
        facts.append(f"the peak of one workload moved by at most {worst:.0%}")
    if memory_moved > worst:
        facts.append(f"reading memory moved by {memory_moved:.0%}")
    turns = [turn for result in run.results for e in result.entries for turn in e.turns]
    late = sum(turn.waits > 0 for turn in turns)
    if late:
        facts.append(f"{late} of {len(turns)} turns waited for the peak")
    return f"{name}: {'; '.join(facts)}."


_BEGIN, _END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"


def page(text: str, run: Run) -> str:
    """A page with the table between its marks; with both at its end if it has none.

    Examples
    --------
    >>> machine = dict.fromkeys(("processor", "isa", "system", "python", "qkv"), "")
    >>> run = Run(
    ...     {**machine, "packages": {}, "peaks": {}, "cores": 2}, {"threads": 2, "rounds": 1}, [0.0]
    ... )
    >>> once = page("Speed", run)
    >>> page(once, run) == once
    True
    """
    if _BEGIN not in text or _END not in text:
        text = f"{text}\n{_BEGIN}\n{_END}\n"
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    return f"{before}{_BEGIN}\n\n{markdown(run)}\n{_END}{after}"


def markdown(run: Run) -> str:
    """The table of a run, with its machine, for a page of documentation."""
    lines = [f"{line}  " for line in headline(run)]
    for table in tables(run):
        lines += ["", *table_lines(table)]
    reasons = notes(run)
    if reasons:
        lines += ["", "Not timed:", "", *(f"- {reason}" for reason in reasons)]
    return "\n".join(lines) + "\n"
