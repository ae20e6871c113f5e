"""`python -m tests.hardening.fuzz --cases 1000000 --state FILE`: many random problems.

Ctrl-C stops a run, and the same command goes on with it. A failure is made smaller, printed, and
written to the folder `kept`, whose problems `test_fuzz.py` runs ever after.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from math import inf
from pathlib import Path

from .problem import Problem
from .runner import State, run
from .shrink import keep, shrunk


def kept(name: str, problem: Problem, error: BaseException) -> str:
    """Where a smaller problem was written, and what is wrong with it."""
    smaller, fault = shrunk(problem, error)
    return f"{keep(name, smaller, fault).name}: {fault!r}"


def main() -> int:
    """Run, and print what was counted; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.hardening.fuzz", description=__doc__)
    parser.add_argument("--cases", type=float, default=inf, help="stop after so many, in all")
    parser.add_argument("--seconds", type=float, default=inf, help="stop after so many, this time")
    parser.add_argument("--seed", type=int, help="0 or more; by default from the clock")
    parser.add_argument("--state", type=Path, help="the file that a run goes on from")
    given = parser.parse_args()
    seed = time.time_ns() % 10**9 if given.seed is None else given.seed
    state = State.read(given.state, seed)
    print(f"seed {seed}", flush=True)
    warnings.simplefilter("error")
    try:
        run(state, given.state, given.cases, given.seconds, kept)
    except KeyboardInterrupt:
        print("stopped")
    print(state)
    return min(len(state.failures), 1)


if __name__ == "__main__":
    sys.exit(main())
