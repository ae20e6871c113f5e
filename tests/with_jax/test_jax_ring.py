"""A ring of devices gives what the definition gives on one, forward and backward."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.with_jax.ring_of_devices import CASES


@pytest.mark.slow
@pytest.mark.parametrize("cases", [[*CASES][::2], [*CASES][1::2]], ids=["even", "odd"])
def test_four_devices(cases: list[str]) -> None:
    script = Path(__file__).with_name("ring_of_devices.py")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    ran = subprocess.run(
        [sys.executable, str(script), *cases],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **flags},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    *lines, refused = ran.stdout.splitlines()
    errors = {name: float(error) for name, error in (line.rsplit(" ", 1) for line in lines)}
    assert list(errors) == cases
    assert max(errors.values()) < 3e-5, errors
    assert "KeyLengths is not a variant of positions" in refused
