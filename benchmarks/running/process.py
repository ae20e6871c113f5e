"""A worker in a process of its own, which is asked and answers in lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Process"]

_ROOT = Path(__file__).parents[2]
"""The folder from which `python -m` finds this package."""
_LONGEST_ANSWER = 900.0
"""Seconds after which a worker counts as hung."""


class Process:
    """One worker and its two pipes.

    Parameters
    ----------
    module : str
        What `python -m` runs: it answers each line of JSON with one line of JSON.
    environment : mapping
        Variables that are set besides those of this process.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._child = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=_ROOT,
            env={**os.environ, **environment},
        )

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._child.stdin
        assert self._child.stdout
        try:
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()
            ready = bool(select.select([self._child.stdout], [], [], _LONGEST_ANSWER)[0])
            line = self._child.stdout.readline() if ready else b""
        except BrokenPipeError:
            ready, line = True, b""
        if line:
            return dict(json.loads(line))
        self._child.kill()
        code = self._child.wait()
        why = f"its process ended with code {code}" if ready else "it did not answer"
        return {"state": "failed", "detail": f"{why}: {self._last_words()}"}

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "nothing was said"

    def close(self) -> None:
        assert self._child.stdin
        # What a process that has ended was still to be told goes nowhere.
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout:
            self._child.stdout.close()
        self._errors.close()
