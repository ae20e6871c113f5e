"""Compiled code stays within its operands, outputs and scratch, and reads nothing unwritten."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from forced import IN_PARTS, WITH_BFLOAT16, as_it_runs, instruction_sets
from qkv.testing import DTYPES
from sampling import sample

PROGRAM = Path(__file__).with_name("guarded_memory.py")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="guard pages are set with Linux's mprotect"
)


def run(side: str, way: str, kernel: str, *which: str) -> subprocess.CompletedProcess[str]:
    isa, _, parts = kernel.partition(" ")
    return subprocess.run(
        [sys.executable, str(PROGRAM), side, way, parts or "whole", *which],
        env={**os.environ, "QKV_NUM_THREADS": "2", "QKV_ISA": isa},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def check(*arguments: str) -> None:
    done = run(*arguments)
    problems = done.stdout.splitlines() or ["before the first problem"]
    assert problems[-1] == "done", f"exit {done.returncode}: {problems[-1]}\n{done.stderr[-2000:]}"


SIDES = ["end", "begin"]
WAYS = ["forward", "backward", "second"]
BEST = instruction_sets()[0]
OTHERS = [f"{as_it_runs('amx')} parts", *(as_it_runs(isa) for isa in WITH_BFLOAT16)]
"""Kernels of bfloat16, which another instruction set does not have, nor second derivatives."""


@pytest.mark.slow
@pytest.mark.sampled(("side", "way"), list(product(SIDES, WAYS)), one_in=4)
def test_every_head_dim(side: str, way: str, pytestconfig: pytest.Config) -> None:
    check(side, way, BEST, "swept", *sample(pytestconfig, list(DTYPES), 4))


@pytest.mark.slow
@pytest.mark.sampled(("side", "way", "kernel"), list(product(SIDES, WAYS[:2], OTHERS)), one_in=12)
def test_every_head_dim_of_bfloat16(
    side: str, way: str, kernel: str, pytestconfig: pytest.Config
) -> None:
    dtypes = sample(pytestconfig, IN_PARTS, 2) if kernel.endswith("parts") else ["bfloat16"]
    check(side, way, kernel, "swept", *dtypes)


@pytest.mark.slow
@pytest.mark.sampled(("side", "way"), list(product(SIDES, [*WAYS, "statistics"])), one_in=4)
def test_random_problems(side: str, way: str, pytestconfig: pytest.Config) -> None:
    structures = pytestconfig.getoption("fuzz") // (100 if way == "statistics" else 50)
    check(side, way, BEST, "random", "0", str(structures))


@pytest.mark.slow
@pytest.mark.sampled(
    ("side", "way", "kernel"),
    list(product(SIDES, [*WAYS[:2], "statistics"], OTHERS[:2])),
    one_in=12,
)
def test_random_problems_of_tiles(side: str, way: str, kernel: str) -> None:
    check(side, way, kernel, "random", "0", "2")
