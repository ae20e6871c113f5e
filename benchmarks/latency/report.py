"""The tables of a run: calls of 64 tokens, and decoding steps."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from benchmarks.latency.front_ends import FRONT_ENDS
from benchmarks.latency.session import STEP
from benchmarks.latency.worker import MANY
from benchmarks.record import Result, Run
from benchmarks.samples import medians
from benchmarks.tables import Table

__all__ = ["tables"]

_MOST_EXTRA = 2
"""Causal kernels that a row's kernel may take longer. More is work outside of compiled code that
grows with the batch, such as rotating rows in NumPy, and must not be taken for the kernel's."""

_CALLS = (
    "One call of 64 tokens, 8 heads, head_dim 64, float32. kernel: what eight more batch rows add, "
    "divided by eight, in us; it has in it what is prepared for each of them. us: the call through "
    "the front end. x: that call, less what its kernel takes longer than the causal one (up to "
    f"{_MOST_EXTRA} causal kernels), divided by the plain causal call in the same turn. "
    "inspect and gradient (forward and backward), NumPy and torch: divided by their own kernels."
)
_STEPS = (
    "One layer of a decoding step, 8 heads, 100 to 1,000 keys, arrays that are new in each step. "
    "us: at a length seen before, in the second to fourth layer. first, later: the first layer and "
    "the later ones that meet a new length, and again: the first layer at a length seen before, "
    "all divided by that."
)


def tables(run: Run) -> list[Table]:
    """Calls, then decoding steps, if any were taken."""
    fronts = [one.name for one in FRONT_ENDS if _has(run, f"{one.name}: ")]
    stepping = [name for name in fronts if _has(run, f"{name}: {STEP}")]
    ahead = ("variants", ">kernel us") if "NumPy" in fronts else ("variants",)
    columns = [*ahead]
    for name in fronts:
        columns += [f">{name} us", ">x"]
    columns += [f">{title}" for title, *_ in _looks(fronts)]
    found = [
        Table(_CALLS, tuple(columns), [_call(result, fronts) for result in run.results]),
    ]
    if stepping:
        columns = ["variants"]
        for name in stepping:
            columns += [f">{name} us", ">first", ">later", ">again"]
        steps = [_step(result, stepping) for result in run.results]
        found.append(Table(_STEPS, tuple(columns), steps))
    return found


def _has(run: Run, beginning: str) -> bool:
    return any(e.contender.startswith(beginning) for r in run.results for e in r.entries)


def _looks(fronts: list[str]) -> Iterator[tuple[str, str, str]]:
    """Column, front end and kind of call of what is divided by its own kernel."""
    if "NumPy" in fronts:
        yield "inspect", "NumPy", "inspect"
        yield "gradient", "NumPy", "gradient"
    if "torch" in fronts:
        yield "torch gradient", "torch", "gradient"


def _call(result: Result, fronts: list[str]) -> tuple[str, ...]:
    row = [result.workload]
    kernel, base = (_kernels(result, "NumPy", name) for name in ("call", "base"))
    if "NumPy" in fronts:
        row.append(_us(_middle(kernel)))
    extra = _extra(kernel, base, list(_times(result, "NumPy: call").values()))
    for name in fronts:
        times, plain = (_times(result, f"{name}: {kind}") for kind in ("call", "base"))
        ratios = [(times[r] - extra) / plain[r] for r in times if r in plain]
        row += [_us(_middle(list(times.values()))), _number(ratios)]
    for _, name, kind in _looks(fronts):
        taken, own = _times(result, f"{name}: {kind}"), _kernels(result, name, kind)
        alone = _middle(own)
        row.append(_number([seconds / alone for seconds in taken.values()] if alone else []))
    return tuple(row)


def _extra(kernel: list[float], base: list[float], calls: list[float]) -> float:
    """Seconds that a row's kernel takes longer; a kernel takes no longer than the call it is in."""
    if not (kernel and base and calls):
        return 0.0
    alone = median(base)
    return max(0.0, min(median(kernel) - alone, median(calls) - alone, _MOST_EXTRA * alone))


def _step(result: Result, fronts: list[str]) -> tuple[str, ...]:
    row = [result.workload]
    for name in fronts:
        seen = _times(result, f"{name}: {STEP}seen later")
        row.append(_us(_middle(list(seen.values()))))
        for kind in ("new first", "new later", "seen first"):
            taken = _times(result, f"{name}: {STEP}{kind}")
            row.append(_number([taken[r] / seen[r] for r in taken if r in seen]))
    return tuple(row)


def _kernels(result: Result, front: str, kind: str) -> list[float]:
    """Seconds of one batch row among many, in each round."""
    one, many = (_times(result, f"{front}: {kind}{suffix}") for suffix in ("", " many"))
    found = [(many[r] - one[r]) / (MANY - 1) for r in many if r in one]
    return found if found and median(found) > 0 else []


def _times(result: Result, name: str) -> dict[int, float]:
    return next((medians(e) for e in result.entries if e.contender == name), {})


def _middle(values: list[float]) -> float | None:
    return median(values) if values else None


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.0f}"


def _number(ratios: list[float]) -> str:
    return f"{median(ratios):.2f}" if ratios else ""
