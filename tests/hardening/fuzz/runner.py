"""Many structures, one after the other, with a record of how far a run has come."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .bounds import LUCKY
from .checks import check
from .draw.structure import random_problem
from .problem import Problem

LAYOUTS = 100
"""Layouts of one structure; more of them are quicker, since kernels are compiled already."""
_SAVED_EVERY = 10.0
"""Seconds."""
MOST_FAILURES = 20


@dataclass
class State:
    """How far a run has come: the next layout of which structure, and what was counted.

    `counts` holds for each purpose the numbers of structures, layouts and draws; a draw is a case.
    """

    seed: int
    structure: int = 0
    layout: int = 0
    seconds: float = 0.0
    counts: dict[str, list[int]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    lucky: list[str] = field(default_factory=list)
    """Layouts with draws that needed neighbours for their bound; see `bounds`."""

    @property
    def cases(self) -> int:
        """Draws of all purposes."""
        return sum(draws for _, _, draws in self.counts.values())

    @classmethod
    def read(cls, path: Path | None, seed: int) -> State:
        """The state of a file, or of a new run if there is none."""
        if path is None or not path.exists():
            return cls(seed)
        found = cls(**json.loads(path.read_text()))
        if found.seed != seed:
            raise SystemExit(f"{path} holds a run with seed {found.seed}, not {seed}.")
        return found

    def write(self, path: Path | None) -> None:
        """Replace the file at once, so that it is whole whenever the process ends."""
        if path is not None:
            beside = path.with_name(path.name + ".new")
            beside.write_text(json.dumps(asdict(self)))
            os.replace(beside, path)

    def __str__(self) -> str:
        lines = [f"{self.cases} cases in {self.seconds:.0f} s, {len(self.failures)} failures"]
        lines.append(f"{len(self.lucky)} layouts were lucky in a hundred orders of addition")
        lines += [
            f"  {purpose:<11} {structures:>5} structures {layouts:>7} layouts {draws:>8} cases"
            for purpose, (structures, layouts, draws) in sorted(self.counts.items())
        ]
        return "\n".join(lines)


def run(
    state: State,
    path: Path | None,
    cases: float,
    seconds: float,
    failed: Callable[[str, Problem, BaseException], str],
) -> None:
    """Check layouts until there are so many cases, or so many seconds have passed.

    A failure is recorded with what `failed(name, problem, error)` says of it; the run goes on.
    """
    begun, before = time.monotonic(), state.seconds
    saved = begun
    try:
        for structure, layout in _from(state.structure, state.layout):
            now = time.monotonic()
            state.seconds = before + now - begun
            enough = state.cases >= cases or now - begun >= seconds
            if enough or len(state.failures) >= MOST_FAILURES:
                return
            if layout == 0 or now - saved > _SAVED_EVERY:
                state.write(path)
                saved = now
            name = f"random_problem({state.seed}, {structure}, {layout})"
            problem = random_problem(state.seed, structure, layout)
            LUCKY.clear()
            try:
                check(problem)
            except Exception as error:
                short = f"{problem.purpose}-{state.seed}-{structure}-{layout}"
                state.failures.append({"problem": name, "fact": failed(short, problem, error)})
                print(name, state.failures[-1]["fact"], flush=True)
            if LUCKY:
                state.lucky.append(f"{name}: {', '.join(LUCKY)}")
            counted = state.counts.setdefault(problem.purpose, [0, 0, 0])
            counted[0] += layout == 0
            counted[1] += 1
            counted[2] += problem.draws
            state.structure, state.layout = divmod(structure * LAYOUTS + layout + 1, LAYOUTS)
    finally:
        state.write(path)


def _from(structure: int, layout: int) -> Iterator[tuple[int, int]]:
    while True:
        yield structure, layout
        structure, layout = divmod(structure * LAYOUTS + layout + 1, LAYOUTS)
