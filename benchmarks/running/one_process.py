"""Run a worker once, in a process of its own that prints its times as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from qkv.errors import ArgumentError

__all__ = ["times_of"]

_ROOT = Path(__file__).parents[2]
_LONGEST = 300.0
"""Seconds after which a process counts as hung."""


def times_of(
    module: str, *arguments: str, who: str, environment: Mapping[str, str]
) -> dict[str, float]:
    """What `python -m module arguments` prints; `who` is what the reader knows it as.

    Raises
    ------
    ArgumentError
        With its last words, if it failed.
    """
    # Users have modules compiled to bytecode once, so this process may write bytecode too.
    ours = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=_ROOT, env={**ours, **environment},
        capture_output=True, text=True, timeout=_LONGEST, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise ArgumentError(f"{who} failed.", [("its last words", last[:300])])
    return dict(json.loads(done.stdout))
