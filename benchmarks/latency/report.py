"""The tables of a run: calls of 64 tokens, and decoding steps.

Each table has one quantity, and a column for each front end, so that it fits into 80 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import TypeAlias

from benchmarks.latency.front_ends import FRONT_ENDS
from benchmarks.latency.session import STEP
from benchmarks.latency.worker import MANY
from benchmarks.results.record import Result, Run
from benchmarks.results.samples import medians
from benchmarks.results.tables import Table

__all__ = ["tables"]

_MOST_EXTRA = 2
"""Causal kernels that a row's kernel may take longer. More is work outside of compiled code that
grows with the batch, such as rotating rows in NumPy, and must not be taken for the kernel's."""

_CALL = "One call of 64 tokens, 8 heads, head_dim 64, float32, in us."
_OVER_CAUSAL = (
    "The same call, less what its kernel takes longer than the causal one (up to "
    f"{_MOST_EXTRA} causal kernels), divided by the plain causal call in the same turn."
)
_KERNEL = (
    "The kernel of that call in us: what eight more batch rows add, divided by eight, with what is "
    "prepared for each of them. inspect and gradient (forward and backward): the whole call, "
    "divided by its own kernel."
)
_STEP = (
    "One layer of a decoding step, 8 heads, 100 to 1,000 keys, arrays that are new in each step, "
    "in us: the second to fourth layer at a length seen before."
)
_BESIDE = "{kind} here, divided by the same at {name}, the least of all turns of each."
_STEP_RATIOS = {
    "new first": "The first layer at a length not seen before, divided by that.",
    "new later": "The second to fourth layer at a length not seen before, divided by that.",
    "seen first": "The first layer at a length seen before, divided by that.",
}

Cell: TypeAlias = Callable[[Result, str], str]


def tables(run: Run) -> list[Table]:
    """Calls, then decoding steps, if any were taken."""
    fronts = [one.name for one in FRONT_ENDS if _has(run, f"{one.name}: ")]
    found = [_by_front(_CALL, run, fronts, _call), _by_front(_OVER_CAUSAL, run, fronts, _over)]
    looks = list(_looks(fronts))
    if looks:
        columns = ("variants", ">kernel", *(f">{title}" for title, *_ in looks))
        found.append(Table(_KERNEL, columns, [_kernel_row(r, looks) for r in run.results]))
    stepping = [name for name in fronts if _has(run, f"{name}: {STEP}")]
    if stepping:
        found.append(_by_front(_STEP, run, stepping, _step))
        for kind, title in _STEP_RATIOS.items():
            found.append(_by_front(title, run, stepping, _step_ratio(kind)))
    other = run.settings.get("beside")
    for kind in _kinds(run) if other else ():
        has_kind = [name for name in fronts if _has(run, f"{name}: {kind}")]
        title = _BESIDE.format(kind=kind.capitalize(), name=other)
        found.append(_by_front(title, run, has_kind, _beside(kind, str(other))))
    return found


def _kinds(run: Run) -> list[str]:
    """The kinds of call that were timed of this revision, in their order."""
    names = (e.contender for r in run.results for e in r.entries if " at " not in e.contender)
    return [*dict.fromkeys(name.partition(": ")[2] for name in names if ": " in name)]


def _beside(kind: str, other: str) -> Cell:
    def cell(result: Result, front: str) -> str:
        here, there = (
            _times(result, f"{front}: {kind}{place}").values() for place in ("", f" at {other}")
        )
        return f"{min(here) / min(there):.2f}" if here and there else ""

    return cell


def _by_front(title: str, run: Run, fronts: Sequence[str], cell: Cell) -> Table:
    rows = [(r.workload, *(cell(r, name) for name in fronts)) for r in run.results]
    return Table(title, ("variants", *(f">{name}" for name in fronts)), rows)


def _has(run: Run, beginning: str) -> bool:
    return any(e.contender.startswith(beginning) for r in run.results for e in r.entries)


def _looks(fronts: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Column, front end and kind of call of what is divided by its own kernel."""
    if "NumPy" in fronts:
        yield "inspect", "NumPy", "inspect"
        yield "gradient", "NumPy", "gradient"
    if "torch" in fronts:
        yield "torch gradient", "torch", "gradient"


def _kernel_row(result: Result, looks: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
    row = [result.workload, _us(_kernels(result, "NumPy", "call"))]
    for _, name, kind in looks:
        taken, own = _times(result, f"{name}: {kind}"), _kernels(result, name, kind)
        row.append(_number([seconds / median(own) for seconds in taken.values()] if own else []))
    return tuple(row)


def _call(result: Result, front: str) -> str:
    return _us(_times(result, f"{front}: call").values())


def _over(result: Result, front: str) -> str:
    times, plain = (_times(result, f"{front}: {kind}") for kind in ("call", "base"))
    extra = _extra(result)
    return _number([(times[r] - extra) / plain[r] for r in times if r in plain])


def _extra(result: Result) -> float:
    """Seconds that a row's kernel takes longer; a kernel takes no longer than the call it is in."""
    kernel, base = (_kernels(result, "NumPy", name) for name in ("call", "base"))
    calls = _times(result, "NumPy: call").values()
    if not (kernel and base and calls):
        return 0.0
    alone = median(base)
    return max(0.0, min(median(kernel) - alone, median(calls) - alone, _MOST_EXTRA * alone))


def _step(result: Result, front: str) -> str:
    return _us(_times(result, f"{front}: {STEP}seen later").values())


def _step_ratio(kind: str) -> Cell:
    def cell(result: Result, front: str) -> str:
        taken = _times(result, f"{front}: {STEP}{kind}")
        seen = _times(result, f"{front}: {STEP}seen later")
        return _number([taken[r] / seen[r] for r in taken if r in seen])

    return cell


def _kernels(result: Result, front: str, kind: str) -> list[float]:
    """Seconds of one batch row among many, in each round."""
    one, many = (_times(result, f"{front}: {kind}{suffix}") for suffix in ("", " many"))
    found = [(many[r] - one[r]) / (MANY - 1) for r in many if r in one]
    return found if found and median(found) > 0 else []


def _times(result: Result, name: str) -> dict[int, float]:
    return next((medians(e) for e in result.entries if e.contender == name), {})


def _us(seconds: Iterable[float]) -> str:
    values = list(seconds)
    return f"{median(values) * 1e6:.0f}" if values else ""


def _number(ratios: list[float]) -> str:
    return f"{median(ratios):.2f}" if ratios else ""
