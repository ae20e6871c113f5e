"""`python -m tests.hardening.hostile.run --calls 10000`: many calls with hostile arguments.

Each draws a subject and one, two or three of its arguments, puts hostile values there, and calls
it. It may return, or raise a `QkvError`, or the TypeError with which Python refuses arguments that
a signature has no place for. It may not take seconds, nor gigabytes, which the process is refused;
and Python's recursion is counted back afterwards.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import qkv

from .subjects import Subject, subjects
from .values import HOSTILE

__all__ = ["call_many", "main"]

SECONDS = 20
"""Seconds of the processor after which a call is said to hang: the machine may be busy with other
work."""
ASLEEP = 300
"""Seconds after which one that waits is."""
MEMORY = 3 * 2**29
"""Bytes beyond those of the process before the first call."""

OF_PYTHON = re.compile(
    r"\(\) (missing|takes|got) |unexpected keyword|multiple values for|required positional|"
    r"abstract (class|method)|takes no arguments|keywords must be strings|Protocols cannot be"
)

PACKAGE = os.path.join(os.path.dirname(qkv.__file__), "")

OF_CALLER = ("of the caller", "no repr", "no comparison", "no truth")
"""What the caller's own functions and objects raise, which goes through as it is."""


class HangError(BaseException):
    """A call takes too long."""


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise HangError

    before = [(kind, signal.signal(kind, stop)) for kind in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(ASLEEP)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for kind, handler in before:
            signal.signal(kind, handler)


def fault_of(error: BaseException) -> str | None:
    """What is wrong with an exception, None if it is one of those that may come."""
    if isinstance(error, qkv.QkvError):
        return None
    if isinstance(error, TypeError) and OF_PYTHON.search(str(error)):
        return None
    if isinstance(error, np.exceptions.AxisError):
        return None  # Reductions name the error of NumPy for an axis that is not there.
    if any(words in str(error) for words in OF_CALLER):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if f.filename.startswith(PACKAGE)]
    place = inside[-1] if inside else frames[-1]
    return f"{type(error).__name__} in {place.name} ({os.path.basename(place.filename)})"


def _is_of_int(error: BaseException, hostile: dict[str, str]) -> bool:
    """Whether `int` was given for a function, and says that it takes no such arguments."""
    said = ("to a scalar index", "int() can't convert")
    return "<class 'int'>" in hostile.values() and any(words in str(error) for words in said)


def _calls_left() -> int:
    """How much deeper calls may go."""
    try:
        return 1 + _calls_left()
    except RecursionError:
        return 0


def call_many(calls: int, seed: int, only: str = "") -> tuple[Counter[str], dict[str, list[str]]]:
    """How the calls ended, and for each kind of fault the calls that have it."""
    rng = np.random.default_rng(seed)
    chosen = [s for s in subjects() if re.search(only, s.name)]
    ended: Counter[str] = Counter()
    faults: dict[str, list[str]] = {}
    deepest = _calls_left()
    for _ in range(calls):
        subject: Subject = chosen[int(rng.integers(len(chosen)))]
        places = list(subject.parameters)
        count = min(int(rng.choice([1, 2, 3], p=[0.7, 0.2, 0.1])), len(places))
        hostile = {
            str(place): list(HOSTILE)[int(rng.integers(len(HOSTILE)))]
            for place in (rng.choice(places, count, replace=False) if count else [])
        }
        try:
            with _time_limit():
                subject.call({name: HOSTILE[label]() for name, label in hostile.items()})
            ended["returned"] += 1
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            fault = None if _is_of_int(error, hostile) else fault_of(error)
            ended["refused" if fault is None else "failed"] += 1
            if fault is not None:
                said = str(error) if not isinstance(error, MemoryError) else ""
                faults.setdefault(f"{fault}: {said:.90}", []).append(f"{subject.name} {hostile}")
        if _calls_left() < deepest:
            faults["recursion is not counted back"] = [f"{subject.name} {hostile}"]
            break  # Nothing works any more.
    return ended, faults


def limit_memory() -> None:
    """Refuse the process more than `MEMORY` beyond what it has."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> int:
    """Run, and print what was counted; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.hardening.hostile.run")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="subjects whose name this pattern is found in")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    every = subjects()
    limit_memory()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        ended, faults = call_many(given.calls, given.seed, given.only)
        os.chdir("/")
    for fault, where in sorted(faults.items(), key=lambda item: -len(item[1])):
        print(len(where), fault.replace("\n", " ").encode("ascii", "backslashreplace").decode())
        for line in where[:3]:
            print("     ", line.encode("ascii", "backslashreplace").decode())
    print(f"{len(every)} subjects; {given.calls} calls: {dict(ended)}")
    return min(len(faults), 1)


if __name__ == "__main__":
    sys.exit(main())
