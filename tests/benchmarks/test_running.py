"""Workers, sessions, peaks and the command: what runs, never how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import qkv
from benchmarks.__main__ import main
from benchmarks.contenders import CONTENDERS, Contender, Prepared, contender, contenders_of
from benchmarks.problems import rules
from benchmarks.problems.reference import Inputs
from benchmarks.problems.workloads import Workload, workloads
from benchmarks.running import revision, session, worker
from benchmarks.running.process import Process
from benchmarks.running.session import Settings
from benchmarks.running.worker import Worker
from qkv.backends.cpu.machine.host import host
from qkv.cost.peaks import PRODUCTS
from qkv.errors import ArgumentError, UnsupportedError
from qkv.problem.building.builder import Shape

ROOT = Path(__file__).parents[2]
TINY = Workload(
    "tiny", Shape((1,), 2, 2, 16, 16, 8, 8), rules.causal(), "float32", "float32", ("qkv",)
)


def right(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    arrays = inputs.query, inputs.key, inputs.value
    variants = workload.rule.variants
    return Prepared(lambda: qkv.attention(*arrays, *variants), lambda out: {"out": out})


def forgets_the_mask(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    arrays = inputs.query, inputs.key, inputs.value
    return Prepared(lambda: qkv.attention(*arrays), lambda out: {"out": out})


def wasteful(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    prepared = right(workload, inputs, threads)

    def run() -> Any:
        wasted = np.ones(2**23)
        return prepared.run() if wasted[-1] else None

    return Prepared(run, prepared.read)


def refuses(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    raise UnsupportedError("it has no words for this.")


def breaks(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    raise RuntimeError("a bug\nof its own")


@pytest.fixture
def seat(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker in this process, with contenders made up for the test."""
    made = ModuleType("benchmarks.contenders.made_up")
    for function in (right, forgets_the_mask, wasteful, refuses, breaks):
        setattr(made, function.__name__, function)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(worker, "workload_of", lambda name: TINY)
    return Worker(lambda name: Contender(name, "numpy", "made_up", name))


def ask(seat: Worker, what: str, **arguments: Any) -> dict[str, Any]:
    return seat.answer({"do": what, "with": arguments})


def prepare(seat: Worker, name: str) -> dict[str, Any]:
    return ask(seat, "prepare", name=name, workload="tiny", threads=1)


# --- one process ---------------------------------------------------------------------------------


def test_a_right_contender_is_timed(seat: Worker) -> None:
    answer = prepare(seat, "right")
    assert answer["state"] == "ready"
    assert answer["error"] <= answer["bound"]
    turn = ask(seat, "turn", name="right", seconds=0.0, least=4)
    assert len(turn["seconds"]) == 4
    assert all(seconds > 0 for seconds in turn["seconds"])
    assert json.loads(json.dumps(turn)) == turn


def test_a_wrong_contender_is_named_and_cannot_be_timed(seat: Worker) -> None:
    answer = prepare(seat, "forgets_the_mask")
    assert answer["state"] == "wrong"
    assert answer["error"] > answer["bound"]
    assert "out is off by" in answer["detail"]
    assert ask(seat, "turn", name="forgets_the_mask", seconds=0.0, least=1)["state"] == "failed"


def test_a_contender_that_cannot_take_part_says_why(seat: Worker) -> None:
    refused = {"state": "refused", "detail": "it has no words for this."}
    assert prepare(seat, "refuses") == refused
    assert prepare(seat, "breaks") == {"state": "failed", "detail": "RuntimeError: a bug"}


def test_a_contender_that_is_not_installed_is_absent() -> None:
    seat = Worker(lambda name: Contender(name, "no-such-package", "made_up"))
    answer = prepare(seat, "short")
    assert answer["state"] == "failed"
    answer = ask(seat, "prepare", name="x", workload="short-16", threads=1)
    assert answer == {"state": "absent", "detail": "no-such-package is not installed"}


def test_whoever_answers_sleeps(seat: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that still spin after the check halved the peak that was measured next."""
    asleep: list[str] = []
    monkeypatch.setattr(worker, "fall_asleep", lambda: asleep.append("now"))
    prepare(seat, "right")
    assert len(asleep) == 1
    ask(seat, "turn", name="right", seconds=0.0, least=1)
    assert len(asleep) == 2


def test_released_contenders_are_gone(seat: Worker) -> None:
    prepare(seat, "right")
    assert ask(seat, "release") == {}
    assert ask(seat, "turn", name="right", seconds=0.0, least=1)["state"] == "failed"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks of memory: Linux only")
def test_memory_beyond_the_output_is_seen(seat: Worker) -> None:
    """64 MiB in use during the call, give or take what the allocator keeps.

    Linux counts resident pages for each CPU and adds them up late, so one reading can be off by
    megabytes; the median of three is not.
    """

    def extra(name: str) -> float:
        found = [ask(seat, "memory", name=name, workload="tiny", threads=1) for _ in range(3)]
        return median(one["extra"] for one in found)

    assert extra("right") < 2**22
    assert abs(extra("wasteful") - 2**26) < 2**22


# --- peaks -------------------------------------------------------------------------------------


def test_a_turn_waits_while_the_machine_is_slower_than_it_was() -> None:
    peaks, slept = iter([90.0, 100.0, 99.0, 98.0, 50.0, 80.0, 96.0]), []
    patient = session.Patient(lambda: next(peaks), slept.append)
    assert patient.measure() == (98.0, 0)
    assert slept == []
    assert patient.measure() == (96.0, 2)
    assert len(slept) == 2


def test_a_machine_that_stays_slower_is_waited_for_once() -> None:
    speed, slept = [100.0], []
    patient = session.Patient(lambda: speed[0], slept.append)
    speed[0] = 60.0
    found, waits = patient.measure()
    assert found == 60.0
    assert waits == len(slept) > 5
    assert patient.measure() == (60.0, 0)


# --- turns ---------------------------------------------------------------------------------------


def test_everybody_has_a_turn_in_each_round_and_another_is_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    class Processes:
        def entry(self, what: str, one: Contender, workload: Workload) -> Any:
            state = "wrong" if one.name == "openvino" else "timed"
            return session.Entry(one.name, "1", state)

        def turn(self, one: Contender) -> dict[str, Any]:
            order.append(one.name)
            if one.name == "jax" and len(order) > 3:
                return {"state": "failed", "detail": "it crashed"}
            return {"seconds": [1.0]}

        def release(self) -> None:
            order.append("released")

    monkeypatch.setattr(session, "_ceiling", lambda workload, threads: None)
    who = [contender(name) for name in ("qkv", "torch", "openvino", "jax")]
    made: Any = Processes()
    result = session._times(TINY, who, made, Settings(1, rounds=3))
    assert order == ["qkv", "torch", "jax", "torch", "jax", "qkv", "qkv", "torch", "released"]
    states = {entry.contender: entry.state for entry in result.entries}
    assert states == {"qkv": "timed", "torch": "timed", "openvino": "wrong", "jax": "failed"}
    assert [len(entry.turns) for entry in result.entries] == [3, 3, 0, 0]


def test_a_process_that_ends_is_a_failure_with_its_last_words() -> None:
    process = Process("benchmarks.running.worker", {"PYTHONPATH": "", "PYTHONHOME": "/nowhere"})
    answer = process.ask({"do": "release", "with": {}})
    assert answer["state"] == "failed"
    assert "its process ended with code 1" in answer["detail"]
    assert not process.alive
    process.close()


@pytest.mark.slow
def test_processes_are_shared_by_library_and_environment() -> None:
    with session._Processes(Settings(1)) as processes:
        for name in ("qkv", "qkv kernel", "qkv avx2"):
            one = contender(name)
            environment = {} if name != "qkv avx2" else {"QKV_ISA": host().isa}
            one = replace(one, environment=environment)
            entry = processes.entry("prepare", one, _named("short-16"))
            assert (entry.state, entry.version) == ("timed", qkv.__version__)
        assert len(processes._running) == 2
        assert "seconds" in processes.turn(replace(contender("qkv kernel"), environment={}))
    assert not processes._running


def _named(name: str) -> Workload:
    return next(workload for workload in workloads() if workload.name == name)


def test_the_table_names_only_contenders_that_exist() -> None:
    for workload in workloads():
        assert len(contenders_of(workload)) == len(set(workload.contenders))
        assert workload.ceiling == "read" or workload.ceiling in PRODUCTS
    used = {name for workload in workloads() for name in workload.contenders}
    assert used == {one.name for one in CONTENDERS}
    with pytest.raises(ArgumentError, match="no contender 'trch'"):
        contender("trch")


def test_only_some_packages_beside_the_first() -> None:
    workload = _named("short-64")
    assert [one.name for one in contenders_of(workload, ("onnxruntime",))] == [
        "qkv",
        "onnxruntime",
    ]


# --- the command ---------------------------------------------------------------------------------


def test_a_package_that_nobody_runs_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["short-16", "--only", "torch,jax"]) == 2
    assert "onnxruntime" in capsys.readouterr().err


def bench(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_one_small_workload_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, page, picture = (str(tmp_path / name) for name in ("a.json", "a.md", "a.svg"))
    files = ("--save", saved, "--markdown", page, "--picture", picture)
    done = bench("--quick", "short-16", "--rounds", "2", "--only", "torch", "--json", *files)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    (result,) = answer["results"]
    entries = {entry["contender"]: entry for entry in result["entries"]}
    assert {name: entry["state"] for name, entry in entries.items()} == {
        "qkv": "timed",
        "qkv torch": "timed",
        "torch": "timed",
    }
    for entry in entries.values():
        assert [turn["round"] for turn in entry["turns"]] == [0, 1]
        assert all(turn["ceiling"] > 0 and len(turn["seconds"]) >= 3 for turn in entry["turns"])
        assert 0 <= entry["error"] <= entry["bound"]
    assert json.loads(Path(saved).read_text()) == answer
    assert "| short-16 |" in Path(page).read_text()
    assert Path(picture).read_text().startswith("<svg")

    assert main(["--load", saved]) == 0
    shown = capsys.readouterr().out
    assert "short-16" in shown
    assert "torch" in shown
    assert main(["--compare", saved, saved]) == 0
    assert "1.00" in capsys.readouterr().out


def test_the_list_names_every_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    answer = capsys.readouterr().out
    assert all(workload.name in answer for workload in workloads())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nothing-like-it"], "no workload"),
        (["--rounds", "0"], "below 1"),
        (["--threads", "0"], "below 1"),
        (["--save", "no/such/folder/a.json"], "no folder"),
        (["--load", "no-such-file.json"], "cannot be read"),
        (["--compare", "a", "b", "c"], "3 names"),
        (["--compare", "no-such-revision"], "git rev-parse did not work"),
    ],
)
def test_wrong_arguments_are_reported_before_anything_runs(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words)) == 2
    assert complaint in capsys.readouterr().err


def test_a_revision_takes_part_as_another_contender() -> None:
    there = revision.Revision("abc1234", {"PYTHONPATH": "tree/src"})
    pair = revision._pair(_named("short-64"), there)
    assert [one.name for one in pair] == ["qkv", "qkv kernel", "qkv at abc1234",
                                          "qkv kernel at abc1234"]  # fmt: skip
    assert pair[2].environment["PYTHONPATH"] == "tree/src"
    assert pair[2].known_as == "qkv"
