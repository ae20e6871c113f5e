"""Every front end in a process of its own, one after the other, through all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.latency.front_ends import FRONT_ENDS, FrontEnd
from benchmarks.latency.rows import Row, rows
from benchmarks.results.record import Entry, Result, Run, Turn
from benchmarks.running.machine import describe, load_average, version_of
from benchmarks.running.process import Process
from benchmarks.running.revision import Revision
from qkv.errors import ArgumentError

__all__ = ["KIND", "STEP", "Settings", "choose", "measure"]

KIND = "latency"
TURNS = 3
"""Turns of each of two revisions, since a shared machine's speed changes within seconds."""
STEP = "step "
"""How the names of decoding times begin; those of whole calls have no prefix."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is measured.

    Attributes
    ----------
    threads : int
        Of everybody.
    rounds : int
        In each, every call of a row has one turn.
    seconds : float
        That a turn lasts, at least.
    """

    threads: int
    rounds: int = 5
    seconds: float = 0.01


def choose(names: Sequence[str]) -> tuple[Row, ...]:
    """The rows whose names begin with one of these; all if there are none.

    Raises
    ------
    ArgumentError
        If no row's name begins so.
    """
    known = rows()
    for name in names:
        if not any(row.name.startswith(name) for row in known):
            raise ArgumentError(
                f"there is no variant {name!r} among the rows.",
                [("rows", "; ".join(row.name for row in known))],
                "Use one of these, or the beginning of some.",
            )
    return tuple(row for row in known if not names or row.name.startswith(tuple(names)))


def measure(
    chosen: Sequence[Row],
    settings: Settings,
    packages: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
    keep: Callable[[Run], None] = lambda run: None,
    beside: Revision | None = None,
) -> Run:
    """Time every row through every front end.

    Parameters
    ----------
    chosen : sequence of Row
    settings : Settings
    packages : sequence of str
        Only front ends of these; all unless given.
    tell : callable (text)
        Told what is going on.
    keep : callable (run)
        Given the run after each front end.
    beside : Revision, optional
        Timed too, in turns with this one.
    """
    settings_of_run = {"kind": KIND, **asdict(settings)}
    if beside is not None:
        settings_of_run["beside"] = beside.name
    run = Run({**describe(), "peaks": {}}, settings_of_run, [load_average()])
    run.results += [Result(row.name, row.name, KIND, 0, "seconds", None) for row in chosen]
    for one in FRONT_ENDS:
        if packages and one.package not in packages:
            continue
        tell(one.name)
        _front_end(one, run.results, settings, beside)
        run.load[1:] = [load_average()]
        keep(run)
    return run


def _front_end(
    one: FrontEnd,
    results: Sequence[Result],
    settings: Settings,
    beside: Revision | None = None,
) -> None:
    number = version_of(one.package)
    environment = {
        name: text.format(threads=settings.threads) for name, text in one.environment.items()
    }
    places = {"": environment}
    if beside is not None:
        places[f" at {beside.name}"] = environment | beside.environment
    processes: dict[str, Process] = {}
    for result in results:
        if number is None:
            absent = Entry(one.name, None, "absent", f"{one.package} is not installed")
            result.entries.append(absent)
            continue
        for name, its_environment in places.items():
            if name not in processes or not processes[name].alive:
                processes[name] = Process("benchmarks.latency.worker", its_environment)
        asked = {
            "front": one.name,
            "row": result.workload,
            "rounds": settings.rounds,
            "seconds": settings.seconds,
        }
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in places}
        for turn in range(TURNS if beside is not None else 1):
            for name in (*places,)[:: -1 if turn % 2 else 1]:
                answers[name].append(processes[name].ask(asked))
        for name, of_place in answers.items():
            result.entries += _entries(one.name, name, number, of_place)
    for process in processes.values():
        process.close()


def _entries(front: str, place: str, number: str, answers: Sequence[dict[str, Any]]) -> list[Entry]:
    """One entry for each kind of call: "torch: call", "torch: step new first at 1234abc"."""
    times: dict[str, list[float]] = {}
    for answer in answers:
        if answer["state"] != "ready":
            return [Entry(f"{front}{place}", number, answer["state"], answer["detail"])]
        steps = {f"{STEP}{kind}": of_kind for kind, of_kind in answer["steps"].items()}
        for kind, of_kind in {**answer["calls"], **steps}.items():
            times.setdefault(kind, []).extend(of_kind)
    return [
        Entry(f"{front}: {kind}{place}", number, "timed", turns=_turns(of_kind))
        for kind, of_kind in times.items()
    ]


def _turns(times: Sequence[float]) -> list[Turn]:
    return [Turn(number, None, [round(seconds, 9)]) for number, seconds in enumerate(times)]
