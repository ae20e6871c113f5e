"""Compiled code stays within its operands, outputs and scratch, and reads nothing unwritten."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from forced import IN_PARTS, instruction_sets, kernels
from qkv.testing import DTYPES
from sampling import sample

PROGRAM = Path(__file__).with_name("guarded_memory.py")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="guard pages are set with Linux's mprotect"
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env={**os.environ, "QKV_NUM_THREADS": "2", **environment},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def check(*arguments: str, **environment: str) -> None:
    done = run(*arguments, **environment)
    problems = done.stdout.splitlines() or ["before the first problem"]
    assert problems[-1] == "done", f"exit {done.returncode}: {problems[-1]}\n{done.stderr[-2000:]}"


SIDES = ["end", "begin"]
WAYS = ["forward", "backward", *(["in parts"] if len(kernels()) > len(instruction_sets()) else [])]


@pytest.mark.sampled(("side", "way"), list(product(SIDES, WAYS)), one_in=4)
def test_every_head_dim(side: str, way: str, pytestconfig: pytest.Config) -> None:
    dtypes = IN_PARTS if way == "in parts" else list(DTYPES)
    check(side, way, "swept", *sample(pytestconfig, dtypes, 4))


@pytest.mark.sampled(("side", "way"), list(product(SIDES, [*WAYS, "statistics"])), one_in=4)
def test_random_problems(side: str, way: str, pytestconfig: pytest.Config) -> None:
    structures = pytestconfig.getoption("fuzz") // (100 if way == "statistics" else 50)
    check(side, way, "random", "0", str(structures))
