"""The workflow of public runners: where it runs, and that it runs what `.ci/run` does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from qkv.backends.cpu.machine import host

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
JOBS = WORKFLOW["jobs"]


def test_every_system_runs_every_python_that_is_declared() -> None:
    matrix = JOBS["platforms"]["strategy"]["matrix"]
    systems = {re.sub(r"-\d+(\.\d+)?", "", name) for name in matrix["os"]}
    assert systems == {"ubuntu", "ubuntu-arm", "macos", "macos-intel", "windows"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {
        found[1] for line in project["classifiers"] if (found := re.search(r"(3\.\d+)$", line))
    }
    assert declared <= set(matrix["python"])
    assert "3.13t" in matrix["python"]


def test_every_instruction_set_has_a_job() -> None:
    sets = {entry["isa"] for entry in JOBS["instruction-sets"]["strategy"]["matrix"]["include"]}
    assert {name.removesuffix("-emulated") for name in sets} == set(host._SHAPES)


def test_jobs_run_the_scripts_of_this_project() -> None:
    commands = {step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step}
    assert commands == {"bash .ci/tests", "python .ci/minima"}
    assert ".ci/tests " in (ROOT / ".ci/run").read_text(encoding="utf-8")
    script = (ROOT / ".ci/tests").read_text(encoding="utf-8")
    chosen = {job["with"] for job in JOBS["platforms"]["strategy"]["matrix"]["include"]}
    for name in chosen:
        assert re.search(rf"^  {name}\)", script, re.MULTILINE), (
            f"{name} is not a case of TESTS_WITH"
        )
