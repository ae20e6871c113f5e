"""The benchmark of new processes: what it runs, and that a wrong result is not timed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.first_calls import worker
from benchmarks.first_calls.__main__ import main
from benchmarks.first_calls.calls import CALLS, COLUMNS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_every_call_is_checked_and_timed(call: str) -> None:
    for module in ("qkv", *CALLS[call].peers):
        command = [sys.executable, "-m", "benchmarks.first_calls.worker", call, module]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if "No module named" in done.stderr:
            continue
        assert done.returncode == 0, done.stderr
        times = json.loads(done.stdout)
        assert tuple(times) == COLUMNS
        assert min(times.values()) > 0


def test_the_worker_imports_nothing_of_qkv_first() -> None:
    program = "import benchmarks.first_calls.worker, sys; print('qkv' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_wrong_result_is_not_timed(monkeypatch) -> None:
    monkeypatch.setitem(
        worker._PREPARE, "qkv", lambda call, query, key, value: lambda qkv: lambda other: value
    )
    with pytest.raises(AssertionError):
        worker.measured("causal", "qkv")


def test_the_reference_is_the_definition() -> None:
    """Three rows of two numbers, by hand: the first sees one key, the last all."""
    query = np.zeros((1, 1, 3, 2))
    value = np.array([[3.0, 0.0], [0.0, 3.0], [3.0, 3.0]]).reshape(1, 1, 3, 2)
    found = worker._from_the_definition(query, query, value)[0, 0]
    np.testing.assert_allclose(found, [[3, 0], [1.5, 1.5], [2, 2]])


@pytest.mark.slow
def test_a_table_of_a_call(capsys) -> None:
    assert main(["--rounds", "1", "decoding step"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"\| decoding step \| qkv, empty cache \|( \d+\.\d \|){5}", lines[4])
    assert "full cache" in lines[5]


def test_an_unknown_call_is_named(capsys) -> None:
    assert main(["causa"]) == 2
    assert "'causa'" in capsys.readouterr().err
