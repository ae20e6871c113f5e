"""Tests on arm64 processors that QEMU imitates, on three models of cores.

    python tools/aarch64

takes conformance cases and then tests of some files, others for each core, for `--minutes`;
`--seed` says which, as `--sample-seed` of pytest does. `--every-case` takes all there are, which is
for a night or two. The first run downloads about 170 MB by apt and pip into `--folder`. It needs
the environment of the tests, and ends with 1 if a test fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from xml.etree import ElementTree

from kernels import compile_server
from system import CORES, PYTHON, Core, SetUpError, System, set_up

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
sys.path.insert(0, str(TESTS))
from installed import needed  # type: ignore[import-not-found]  # noqa: E402

ALWAYS = "tests/hardening/test_instruction_sets.py"
"""The conformance cases: those of each day are another sample."""
SUITES = (
    "backends", "cache", "call_cache", "cli", "conformance", "errors", "golden", "gradients",
    "hardening", "inspection", "mechanisms", "planning", "problem", "properties", "samples",
    "variants",
)  # fmt: skip
"""Folders of tests in which something is computed; what others find is the same on any machine."""
INSTALLED = {"llvmlite", "hypothesis", "threadpoolctl", "array_api_compat"}
NOT_HERE = {
    r"llvm\.initialize_all_targets": "read code of other machines, the same from everywhere",
    r"RLIMIT_AS|setrlimit": "QEMU does not enforce limits of memory",
    r"SIGINT|send_signal|PROT_NONE": "signals and protected pages are QEMU's own there",
    r"perf_counter|monotonic|timeout=": "its time limits are too short for QEMU",
}  # fmt: skip
"""What a test file contains that cannot run there, and why."""
FILES_A_DAY = 6
"""Test files from which each core takes tests, besides the conformance cases."""
SECONDS_OF_LAST_TEST = 600
"""How long after `--minutes` a core may still be busy. Then a test hangs, or is too large."""


@dataclass
class Outcome:
    """What one core has run."""

    core: Core
    exit_code: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    output: str = ""
    passed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def is_good(self) -> bool:
        """Tests ran, and all of them passed or were skipped."""
        return self.exit_code == 0 and not self.failed and bool(self.passed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which sample (0)")
    parser.add_argument("--minutes", type=float, default=3.5, help="no test begins later (3.5)")
    parser.add_argument("--every-case", action="store_true", help="all files, cases and hours")
    parser.add_argument("--core", choices=[c.model for c in CORES], help="one model alone")
    parser.add_argument("--folder", type=Path, default=_default_folder(), help="of the downloads")
    parser.add_argument("tests", nargs="*", help="test files, instead of a sample")
    asked = parser.parse_args()
    begin = time.monotonic()
    try:
        system = set_up(asked.folder)
    except SetUpError as error:
        print(f"The arm64 machine cannot be set up: {error}", file=sys.stderr)
        return 2
    print(f"arm64 under QEMU: set up in {time.monotonic() - begin:.0f} s, in {asked.folder}")
    cores = [core for core in CORES if asked.core in (None, core.model)]
    sampled = not (asked.tests or asked.every_case)
    limit = 60 * asked.minutes + SECONDS_OF_LAST_TEST if sampled else threading.TIMEOUT_MAX
    with tempfile.TemporaryDirectory() as place:
        socket = Path(place, "compiler")
        os.environ["QKV_CACHE_DIR"] = str(asked.folder / "kernels")
        with compile_server(socket) as made, ThreadPoolExecutor(len(cores)) as threads:
            groups: list[int] = []
            jobs = [
                threads.submit(run, system, core, arguments(asked, number), socket, limit, groups)
                for number, core in enumerate(cores)
            ]
            try:
                outcomes = [job.result() for job in jobs]
            except KeyboardInterrupt:
                for group in groups:
                    _end(group)
                raise
        print(f"{len(made)} kernels were compiled on this side")
    for outcome in outcomes:
        if not outcome.is_good:
            print(f"\n{outcome.core.model} failed with exit code {outcome.exit_code}")
            print(outcome.output)
    print(*report(outcomes), sep="\n")
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def _default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qkv-aarch64"


def test_files() -> tuple[list[str], Counter[str]]:
    """The files that can run there, and for the others how many there are for each reason."""
    found, left = [], Counter[str]()
    folders = [TESTS / suite for suite in SUITES]
    for path in sorted(path for folder in folders for path in folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        reason = next((why for what, why in NOT_HERE.items() if re.search(what, text)), None)
        if needed(path) - INSTALLED:
            reason = "need torch or another package that is not installed there"
        if reason is None:
            found.append(str(path.relative_to(ROOT)))
        else:
            left[reason] += 1
    return found, left


def arguments(asked: argparse.Namespace, number: int) -> list[str]:
    """What pytest is asked to run on the core with this number."""
    if asked.tests:
        return [f"--sample-seed={asked.seed}", *asked.tests]
    files, _ = test_files()
    if asked.every_case:
        return ["--every-case", *files]
    seed = asked.seed * len(CORES) + number
    files.remove(ALWAYS)
    mixed = Random(0).sample(files, len(files))
    first = seed * FILES_A_DAY
    chosen = {mixed[(first + n) % len(mixed)] for n in range(FILES_A_DAY)}
    seconds = 60 * asked.minutes
    os.environ["QKV_AARCH64_SECONDS"] = str(seconds)
    return ["-p", "until_time_is_over", f"--sample-seed={seed}", ALWAYS, *sorted(chosen)]


def run(
    system: System,
    core: Core,
    asked: list[str],
    socket: Path,
    limit: float,
    groups: list[int],
) -> Outcome:
    """Run pytest on one core for at most `limit` seconds, and add its process group to `groups`."""
    begin = time.monotonic()
    root = system.root(core)
    starter = socket.with_name(f"python-{core.model}")
    starter.write_text(
        f'#!/bin/sh\nexec "{system.qemu}" -cpu {core.model} -L "{root}" '
        f'"{root}/usr/bin/{PYTHON}" "$@"\n'
    )
    starter.chmod(0o700)
    path = [ROOT / "tools/aarch64/guest", ROOT / "src", ROOT / "tests", ROOT, system.site]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "QKV_AARCH64_PYTHON": str(starter),
        "QKV_AARCH64_COMPILER": str(socket),
        "QKV_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "QKV_TEST_PATIENCE": "10",
    }
    for name in ("QKV_ISA", "PYTEST_ADDOPTS", "VIRTUAL_ENV"):
        environment.pop(name, None)
    results = socket.with_name(f"{core.model}.xml")
    command = [
        str(starter), "-m", "pytest", "-v", "-ra", "-o", "addopts=", "-p", "no:cacheprovider",
        "-m", "not browser and not large", "--durations=5", f"--junitxml={results}", *asked,
    ]  # fmt: skip
    log = socket.with_name(f"{core.model}.log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        groups.append(process.pid)
        timer = threading.Timer(limit, _end, (process.pid,))
        timer.start()
        _, status, used = os.wait4(process.pid, 0)
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - begin
    output = log.read_text(errors="replace")
    if seconds >= limit:
        output += f"\nThe last of these tests still ran after {limit:.0f} s, and was ended.\n"
    outcome = Outcome(core, process.returncode, seconds, used.ru_utime + used.ru_stime, output)
    if results.exists():
        for test in ElementTree.parse(results).iter("testcase"):
            kinds = {child.tag for child in test}
            count = outcome.passed
            if kinds & {"failure", "error"}:
                count = outcome.failed
            elif "skipped" in kinds:
                count = outcome.skipped
            count[suite(test.get("classname", ""))] += 1
    return outcome


def _end(group: int) -> None:
    """End a process and its children, unless they have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def suite(name: str) -> str:
    """The folder of a test, as in tests.backends.test_decode."""
    parts = name.split(".")
    return parts[1] if len(parts) > 2 else parts[0]


def report(outcomes: list[Outcome]) -> Iterator[str]:
    """A table of passed tests by suite and core, and what was left out."""
    suites = sorted({name for o in outcomes for name in (*o.passed, *o.failed, *o.skipped)})
    yield f"\n{'passed':<16}" + "".join(f"{o.core.model:>14}" for o in outcomes)
    for name in suites:
        yield f"{name:<16}" + "".join(f"{o.passed[name]:>14}" for o in outcomes)
    for title in ("passed", "failed", "skipped"):
        counts = [getattr(o, title).total() for o in outcomes]
        yield f"{'all ' + title:<16}" + "".join(f"{n:>14}" for n in counts)
    left = [re.search(r"^left for want of time: (\d+)$", o.output, re.M) for o in outcomes]
    yield f"{'not begun':<16}" + "".join(f"{found[1] if found else 0:>14}" for found in left)
    yield f"{'seconds':<16}" + "".join(f"{o.seconds:>14.0f}" for o in outcomes)
    yield f"{'of a processor':<16}" + "".join(f"{o.cpu_seconds:>14.0f}" for o in outcomes)
    for outcome in outcomes:
        for line in outcome.output.splitlines():
            if line.startswith("SKIPPED"):
                yield f"{outcome.core.model}: {line}"
    for reason, count in test_files()[1].items():
        yield f"{count} test files of these suites do not run there: {reason}"


if __name__ == "__main__":
    sys.exit(main())
