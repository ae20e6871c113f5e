"""The turns of all processes, and the table of their least times."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec

from benchmarks import cache_steps
from benchmarks.cache_steps.worker import FRONTS
from benchmarks.results.tables import Table, markdown
from benchmarks.running.one_process import times_of
from benchmarks.running.revision import Revision, checked_out
from qkv.cli import Parser, exit_code
from qkv.errors import ArgumentError

__all__ = ["main"]

_ROUNDS = 3
_WORKER = "benchmarks.cache_steps.worker"


def _table(rounds: int, there: Revision | None) -> Table:
    fronts = [front for front in FRONTS if front == "qkv" or find_spec("torch")]
    runs: list[tuple[str, str, dict[str, str]]] = [(front, front, {}) for front in fronts]
    if there:
        own = [front for front in fronts if front.startswith("qkv")]
        runs += [(f"{front} at {there.name}", front, there.environment) for front in own]
    least: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for title, front, environment in runs:
            found = times_of(_WORKER, front, who=front, environment=environment)
            old = least.setdefault(title, found)
            least[title] = {name: min(old[name], found[name]) for name in found}
    caches = dict.fromkeys(name for times in least.values() for name in times)
    cells = [
        (cache, *(f"{t[cache]:.0f}" if cache in t else "" for t in least.values()))
        for cache in caches
    ]
    title = f"Microseconds of a step over some 100 keys, the least of {rounds} processes."
    return Table(title, ("cache", *(f">{title}" for title in least)), cells)


def _run(argv: Sequence[str] | None) -> str:
    parser = Parser(
        prog="python -m benchmarks.cache_steps",
        description=(cache_steps.__doc__ or "").splitlines()[0],
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=_ROUNDS, metavar="N")
    parser.add_argument("--compare", metavar="REVISION", help="run beside this one in turns")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        raise ArgumentError(f"--rounds is {options.rounds}.", action="Pass 1 or more.")
    with checked_out(options.compare) if options.compare else nullcontext(None) as there:
        return "\n".join(markdown(_table(options.rounds, there)))


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: _run(argv), "python -m benchmarks.cache_steps")


if __name__ == "__main__":
    sys.exit(main())
