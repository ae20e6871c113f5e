"""The turns of all processes, and the table of their least times."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks import first_calls
from benchmarks.first_calls.calls import CALLS, COLUMNS
from benchmarks.results.tables import Table, markdown
from benchmarks.running.one_process import times_of
from benchmarks.running.revision import Revision, checked_out
from qkv.cli import Parser, exit_code
from qkv.errors import ArgumentError

__all__ = ["main"]

_ROUNDS = 5
_WORKER = "benchmarks.first_calls.worker"


class _Row(NamedTuple):
    call: str
    who: str
    module: str
    environment: Mapping[str, str]


def _rows(names: Sequence[str], folder: Path, there: Revision | None) -> Iterator[_Row]:
    """The rows in the order in which they run: a full cache is what the row before it has left."""
    revisions: list[tuple[str, dict[str, str]]] = [("qkv", {})]
    if there:
        revisions.append((f"qkv at {there.name}", there.environment))
    for number, name in enumerate(names):
        for who, variables in revisions:
            cache = folder / f"{who} {number}"
            for state in ("empty", "full"):
                own = {**variables, "QKV_CACHE_DIR": str(cache)}
                yield _Row(name, f"{who}, {state} cache", "qkv", own)
        for peer in CALLS[name].peers:
            if find_spec(peer):
                yield _Row(name, peer, peer, {})


def _table(names: Sequence[str], rounds: int, there: Revision | None) -> Table:
    least: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="qkv-first-calls-") as folder:
            for row in _rows(names, Path(folder), there):
                found = times_of(
                    _WORKER, row.call, row.module, who=f"{row.who} at {row.call}",
                    environment=row.environment,
                )  # fmt: skip
                times = [found[column] for column in COLUMNS]
                old = least.setdefault((row.call, row.who), times)
                least[row.call, row.who] = list(map(min, old, times))
    cells = [(call, who, *(f"{t:.1f}" for t in times)) for (call, who), times in least.items()]
    title = f"Milliseconds in a new process, the least of {rounds}."
    return Table(title, ("call", "by", *(f">{column}" for column in COLUMNS)), cells)


def _run(argv: Sequence[str] | None) -> str:
    parser = Parser(
        prog="python -m benchmarks.first_calls",
        description=(first_calls.__doc__ or "").splitlines()[0],
        allow_abbrev=False,
    )
    parser.add_argument("calls", nargs="*", metavar="NAME", help=f"of {', '.join(CALLS)}")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, metavar="N")
    parser.add_argument("--compare", metavar="REVISION", help="run beside this one in turns")
    options = parser.parse_args(argv)
    if unknown := set(options.calls) - set(CALLS):
        raise ArgumentError(
            f"there is no call {', '.join(map(repr, sorted(unknown)))}.",
            action=f"Name some of {', '.join(CALLS)}.",
        )
    if options.rounds < 1:
        raise ArgumentError(f"--rounds is {options.rounds}.", action="Pass 1 or more.")
    revision = checked_out(options.compare) if options.compare else nullcontext(None)
    with revision as there:
        table = _table(options.calls or list(CALLS), options.rounds, there)
    return "\n".join(markdown(table))


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: _run(argv), "python -m benchmarks.first_calls")


if __name__ == "__main__":
    sys.exit(main())
