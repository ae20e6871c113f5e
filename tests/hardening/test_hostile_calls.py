"""Calls of everything public with hostile arguments; many, with `--hostile N`.

A run is a process of its own, which is refused memory beyond some, and each call has seconds.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_exception_is_one_of_ours(pytestconfig: pytest.Config) -> None:
    calls = pytestconfig.getoption("hostile")
    seed = pytestconfig.getoption("hostile_seed")
    command = [sys.executable, "-m", "tests.hardening.hostile.run"]
    done = subprocess.run(
        [*command, "--calls", str(calls), "--seed", str(seed)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # Neither everything is refused nor nothing.
    ended = {kind: int(count) for kind, count in re.findall(r"'(\w+)': (\d+)", done.stdout)}
    assert sum(ended.values()) == calls
    assert min(ended["returned"], ended["refused"]) > calls / 10


@pytest.mark.slow
def test_a_raw_exception_and_a_hang_are_found(tmp_path: Path) -> None:
    """What the run would say if arguments of one method were not checked."""
    code = (
        "import sys, tests.hardening.hostile.run as run\n"
        "from tests.hardening.hostile.subjects import Subject\n"
        "run.SECONDS = 1\n"
        "def raw(hostile): [].no_such\n"
        "def hangs(hostile):\n    while True: pass\n"
        "def allocates(hostile): bytearray(2**33)\n"
        "found = tuple(Subject(f.__name__, ('x',), f) for f in (raw, hangs, allocates))\n"
        "run.subjects = lambda: found\n"
        "sys.argv = ['run', '--calls', '12']\n"
        "sys.exit(run.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    for kind in ("AttributeError in raw", "HangError in ", "MemoryError in allocates"):
        assert kind in done.stdout
