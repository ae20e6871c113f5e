"""What is kept of a run, and its form as JSON.

Every single time is kept, so that another reading of the same run needs no second run.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from qkv.errors import FileError
from qkv.files.writing import replace_file

__all__ = ["SCHEMA", "Entry", "Result", "Run", "State", "Turn", "load", "save", "to_json"]

SCHEMA = 2

State: TypeAlias = Literal["timed", "absent", "refused", "wrong", "failed"]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one contender did in one round.

    Attributes
    ----------
    round : int
        From 0.
    ceiling : float or None
        What the machine did just before: operations or bytes a second.
    seconds : list of float
        Of each call.
    waits : int
        How often the machine was slower than before and was given a moment, before the turn.
    """

    round: int
    ceiling: float | None
    seconds: list[float]
    waits: int = 0


@dataclass(slots=True)
class Entry:
    """One contender at one workload.

    Attributes
    ----------
    contender, version : str
        Who, and the version of its package.
    state : str
        "timed", or why there are no times: "absent", "refused", "wrong", "failed".
    detail : str
        Why, in words.
    output, error, bound
        The output with the largest error against its bound, in the check before the first time.
    turns : list of Turn
    extra_bytes : int or None
        Where memory is measured.
    """

    contender: str
    version: str | None
    state: State
    detail: str = ""
    output: str | None = None
    error: float | None = None
    bound: float | None = None
    turns: list[Turn] = field(default_factory=list)
    extra_bytes: int | None = None


@dataclass(slots=True)
class Result:
    """One workload: how much work it is, what bounds it, and who ran it; the first leads."""

    workload: str
    summary: str
    measure: str
    work: int
    unit: str
    ceiling: str | None
    entries: list[Entry] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """Everything of one run of the benchmark.

    Attributes
    ----------
    machine : dict
        As `machine.describe` gives it.
    settings : dict
        Threads, rounds, seconds of a turn.
    load : list of float
        Load average before and after.
    results : list of Result
    schema : int
        Of this form.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    load: list[float]
    results: list[Result] = field(default_factory=list)
    schema: int = SCHEMA


def to_json(run: Run) -> str:
    """Strict JSON, one line: it is for programs, and long."""
    return json.dumps(asdict(run), allow_nan=False) + "\n"


def save(run: Run, path: str) -> None:
    """Write a run to a file, whole: it is saved after each workload, and may be interrupted."""
    replace_file(path, to_json(run).encode())


def load(path: str) -> Run:
    """Read a saved run.

    Raises
    ------
    FileError
        If the file is not one, or of another schema.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise FileError(
                f"{path} is a saved run of schema {document['schema']}, and {SCHEMA} is read.",
                action="Run python -m benchmarks --save again.",
            )
        return Run(**{**document, "results": [_result(r) for r in document["results"]]})
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"{path} is not a saved run.",
            [("seen", f"{type(error).__name__}: {error}")],
            "Pass a file that python -m benchmarks --save wrote.",
        ) from error


def _result(document: dict[str, Any]) -> Result:
    return Result(**{**document, "entries": [_entry(e) for e in document["entries"]]})


def _entry(document: dict[str, Any]) -> Entry:
    return Entry(**{**document, "turns": [Turn(**turn) for turn in document["turns"]]})
