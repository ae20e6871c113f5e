"""qkv and another implementation of attention, each in a process of its own, in turns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.models.rows import Row
from benchmarks.results.record import Entry, Result, Run, Turn
from benchmarks.running.machine import describe, load_average, version_of
from benchmarks.running.process import Process
from qkv.errors import UnsupportedError

__all__ = ["KIND", "Settings", "largest_difference", "measure"]

KIND = "models"

_BOUND = 5e-3
"""The largest difference of two results, as a share of the largest value of one."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is measured.

    Attributes
    ----------
    threads : int
        Of everybody.
    rounds : int
        Each implementation has one turn in each.
    seconds : float
        That a turn lasts, at least.
    """

    threads: int
    rounds: int = 5
    seconds: float = 0.3


def measure(
    chosen: Sequence[Row],
    settings: Settings,
    tell: Callable[[str], None] = lambda text: None,
    keep: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Run each row with qkv and with the other implementation.

    Parameters
    ----------
    chosen : sequence of Row
    settings : Settings
    tell : callable (text)
        Told what is going on.
    keep : callable (run)
        Given the run after each row.

    Raises
    ------
    UnsupportedError
        If transformers or torch is not installed.
    """
    numbers = {name: _version(name) for name in ("qkv", "torch", "transformers")}
    settings_of_run = {"kind": KIND, **asdict(settings)}
    machine = describe()
    machine["packages"]["transformers"] = numbers["transformers"]
    run = Run({**machine, "peaks": {}}, settings_of_run, [load_average()])
    with tempfile.TemporaryDirectory(prefix="qkv-benchmarks-") as folder:
        processes: dict[str, Process] = {}
        try:
            for number, row in enumerate(chosen, 1):
                tell(f"{number}/{len(chosen)} {row.name}")
                run.results.append(_row(row, processes, settings, Path(folder), numbers))
                run.load[1:] = [load_average()]
                keep(run)
        finally:
            for process in processes.values():
                process.close()
    return run


def _row(
    row: Row,
    processes: dict[str, Process],
    settings: Settings,
    folder: Path,
    numbers: Mapping[str, str],
) -> Result:
    """Entries "qkv: total", "sdpa: total", "qkv: interface", ...; results are compared first."""
    names = ("qkv", row.model.other)
    result = Result(row.name, row.name, KIND, 0, "seconds", None)
    files = {name: folder / f"{name}.npz" for name in names}
    for name in names:
        asked = {"row": row.name, "implementation": name, "threads": settings.threads}
        answer = _ask(name, processes, settings, "prepare", **asked, result=str(files[name]))
        if answer["state"] != "ready":
            result.entries.append(Entry(name, None, answer["state"], answer["detail"]))
    if result.entries:
        return result
    found, expected = (dict(np.load(files[name])) for name in names)
    error = largest_difference(found, expected)
    if not error <= _BOUND:
        detail = f"its result is off by {error:.1e} of the largest value; the bound is {_BOUND:.0e}"
        result.entries.append(Entry("qkv", numbers["qkv"], "wrong", detail, "out", error, _BOUND))
        return result
    turns: dict[str, list[Turn]] = {}
    for number in range(settings.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            answer = _ask(name, processes, settings, "turn", seconds=settings.seconds)
            if "runs" not in answer:
                result.entries.append(Entry(name, None, "failed", answer["detail"]))
                return result
            for part in answer["runs"][0]:
                seconds = [round(run[part], 9) for run in answer["runs"]]
                turns.setdefault(f"{name}: {part}", []).append(Turn(number, None, seconds))
    for name, of_part in turns.items():
        who = "qkv" if name.startswith("qkv") else "torch"
        entry = Entry(name, numbers[who], "timed", turns=of_part)
        entry.output, entry.error, entry.bound = "out", error, _BOUND
        result.entries.append(entry)
    return result


def largest_difference(
    found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]
) -> float:
    """The largest difference of all outputs, as a share of the largest value.

    It is infinite if an output is not finite.

    Where tokens were generated, rows are compared up to the first token in which they differ,
    which two almost equal logits may decide; what comes after answers another question.
    """
    same = np.ones((), bool)
    if "tokens" in expected:
        agreed = np.cumprod(found["tokens"] == expected["tokens"], axis=1).astype(bool)
        # The logits of a step follow from the tokens before it.
        same = np.concatenate([np.ones_like(agreed[:, :1]), agreed[:, :-1]], axis=1).T[..., None]
    worst = 0.0
    for name in expected:
        if name == "tokens":
            continue
        gap = np.abs(found[name] - expected[name])
        if not np.isfinite(found[name]).all():
            return float("inf")
        worst = max(worst, float((gap * same).max() / np.abs(expected[name]).max()))
    return worst


def _ask(
    name: str, processes: dict[str, Process], settings: Settings, what: str, **arguments: Any
) -> dict[str, Any]:
    threads = str(settings.threads)
    if name not in processes or not processes[name].alive:
        variables = ("QKV_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {**dict.fromkeys(variables, threads), "HF_HUB_OFFLINE": "1"}
        processes[name] = Process("benchmarks.models.worker", environment)
    return processes[name].ask({"do": what, "with": arguments})


def _version(package: str) -> str:
    found = version_of(package)
    if found is None:
        raise UnsupportedError(
            f"models need {package}, which is not installed.",
            action='Install it: pip install -e ".[hf]".',
        )
    return found
