"""Turns: one process for each library, one at work at a time, peaks measured in between.

Why processes: thread pools spin after their work, and would be in the way of the next contender;
some settings are read when a library is loaded; and one that crashes ends only itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

from benchmarks.contenders import Contender, contenders_of
from benchmarks.problems.workloads import Workload
from benchmarks.results.record import Entry, Result, Run, Turn
from benchmarks.running.machine import describe, load_average
from benchmarks.running.process import Process
from qkv.cost.peaks import Ceiling, product_ceiling, read_ceiling, survey
from qkv.errors import KernelBuildError

__all__ = ["Settings", "bench"]

_FEW_ROUNDS = 3
_PATIENCE = 5.0

_AS_BEFORE = 0.95
"""Share of the best peak so far from which on the machine is taken to be what it was."""
_FIRST_PEAKS = 3
_MOMENT = 0.2
_MOMENTS = 25

Told: TypeAlias = Callable[[str], None]
LineUp: TypeAlias = Callable[[Workload], Sequence[Contender]]


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is measured.

    Attributes
    ----------
    threads : int
        Of every contender, and of the peaks.
    rounds : int
        Each contender has one turn in each.
    seconds : float
        That a turn lasts, at least.
    least : int
        Calls of a turn, at least.
    """

    threads: int
    rounds: int = 7
    seconds: float = 0.15
    least: int = 3


def bench(
    chosen: Sequence[Workload],
    settings: Settings,
    line_up: LineUp = contenders_of,
    tell: Told = lambda text: None,
    keep: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Run workloads, each by all of its contenders in turns.

    Parameters
    ----------
    chosen : sequence of Workload
    settings : Settings
    line_up : callable (workload)
        Who runs a workload; the others are compared with the first.
    tell : callable (text)
        Told what is going on.
    keep : callable (run)
        Given the run after each workload, so that an interruption loses one at most.
    """
    load = load_average()
    run = Run({**describe(), "peaks": _survey(settings.threads)}, asdict(settings), [load])
    with _Processes(settings) as processes:
        for number, workload in enumerate(chosen, 1):
            tell(f"{number}/{len(chosen)} {workload.name}")
            measure = _memory if workload.measure == "memory" else _times
            run.results.append(measure(workload, line_up(workload), processes, settings))
            run.load[1:] = [load_average()]
            keep(run)
    return run


def _times(
    workload: Workload, who: Sequence[Contender], processes: _Processes, settings: Settings
) -> Result:
    ceiling = _ceiling(workload, settings.threads)
    patient = Patient(ceiling.measure) if ceiling else None
    unit = "bytes" if workload.ceiling == "read" else "operations"
    result = _result(workload, unit, ceiling.name if ceiling else None)
    for one in who:
        result.entries.append(processes.entry("prepare", one, workload))
    ready = [
        (one, entry)
        for one, entry in zip(who, result.entries, strict=True)
        if entry.state == "timed"
    ]
    for number in range(settings.rounds):
        # Everybody follows everybody: whoever comes first would always meet the coolest machine.
        turn = number % max(len(ready), 1)
        for one, entry in ready[turn:] + ready[:turn]:
            if entry.state != "timed" or _has_enough(entry):
                continue
            limit, waits = patient.measure() if patient else (None, 0)
            answer = processes.turn(one)
            if "seconds" in answer:
                entry.turns.append(Turn(number, limit, answer["seconds"], waits))
            else:
                entry.state, entry.detail, entry.turns = "failed", answer["detail"], []
    processes.release()
    return result


class Patient:
    """Measures a peak, and again after a moment while it is lower than it has been.

    A neighbour that halves a core for a second would else be held against whoever's turn it is. It
    gives up after some moments: a processor may have become slower for good.
    """

    def __init__(
        self, peak: Callable[[], float], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._peak, self._sleep = peak, sleep
        self._best = max(peak() for _ in range(_FIRST_PEAKS))

    def measure(self) -> tuple[float, int]:
        """The peak, and how many moments it took."""
        for waits in range(_MOMENTS):
            found = self._peak()
            self._best = max(self._best, found)
            if found >= _AS_BEFORE * self._best:
                return found, waits
            self._sleep(_MOMENT)
        self._best = self._peak()
        return self._best, _MOMENTS


def _has_enough(entry: Entry) -> bool:
    """Three rounds will do for whoever takes seconds."""
    spent = sum(sum(turn.seconds) for turn in entry.turns)
    return len(entry.turns) >= _FEW_ROUNDS and spent > _PATIENCE


def _memory(
    workload: Workload, who: Sequence[Contender], processes: _Processes, settings: Settings
) -> Result:
    result = _result(workload, "bytes", None)
    for one in who:
        processes.close()
        result.entries.append(processes.entry("memory", one, workload))
    processes.close()
    return result


def _result(workload: Workload, unit: str, ceiling: str | None) -> Result:
    work = 0 if workload.measure == "memory" else workload.work
    return Result(workload.name, workload.summary, workload.measure, work, unit, ceiling)


def _survey(threads: int) -> dict[str, float]:
    try:
        return survey(threads)
    except (ImportError, OSError, KernelBuildError):
        return {}


def _ceiling(workload: Workload, threads: int) -> Ceiling | None:
    """None where there is no compiler for this machine."""
    try:
        if workload.ceiling == "read":
            return read_ceiling(workload.bytes_read, threads)
        return product_ceiling(workload.ceiling, threads)
    except (ImportError, OSError, KernelBuildError):
        return None


class _Processes:
    """The contenders' processes: those of one library and one environment share one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running: dict[tuple[str, str], Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def entry(self, what: str, one: Contender, workload: Workload) -> Entry:
        """Prepare a contender, or measure its memory, and say how that went."""
        threads = self._settings.threads
        answer = self._ask(one, what, workload=workload.name, threads=threads)
        entry = Entry(
            one.name, one.version, "timed" if answer["state"] == "ready" else answer["state"]
        )
        entry.detail, entry.extra_bytes = answer["detail"], answer.get("extra")
        entry.output, entry.error, entry.bound = (
            answer.get(field) for field in ("output", "error", "bound")
        )
        return entry

    def turn(self, one: Contender) -> dict[str, Any]:
        settings = self._settings
        return self._ask(one, "turn", seconds=settings.seconds, least=settings.least)

    def release(self) -> None:
        for key, process in list(self._running.items()):
            if "state" in process.ask({"do": "release", "with": {}}):
                del self._running[key]

    def close(self) -> None:
        for process in self._running.values():
            process.close()
        self._running.clear()

    def _ask(self, one: Contender, what: str, **arguments: Any) -> dict[str, Any]:
        environment = {
            name: text.format(threads=self._settings.threads)
            for name, text in one.environment.items()
        }
        key = one.package, json.dumps(environment)
        if key not in self._running:
            self._running[key] = Process("benchmarks.running.worker", environment)
        arguments["name"] = one.known_as or one.name
        answer = self._running[key].ask({"do": what, "with": arguments})
        if not self._running[key].alive:
            del self._running[key]
        return answer
