"""A script in a process of its own, for which JAX shows several devices."""

from __future__ import annotations

import os
import subprocess
import sys


def run_on_devices(script: str, count: int, **flags: str) -> None:
    """Run a script that prints how many devices it has last."""
    flags["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **flags},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(count)
