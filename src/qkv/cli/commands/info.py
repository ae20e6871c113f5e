"""`qkv info`: what this machine is and what it can run."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import numpy as np
from rich.table import Table
from rich.text import Text

import qkv
from qkv.backends import broken_backends
from qkv.errors import ArgumentError, QkvError
from qkv.inspection.summaries.terminal import Page

__all__ = ["run"]

_PACKAGES = ("numpy", "ml_dtypes", "llvmlite", "safetensors", "rich")
_OPTIONAL = ("torch", "transformers", "jax")
"""Shown if they are installed; none of them is imported, which takes seconds."""


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    about = {
        "qkv": {"version": qkv.__version__, "folder": qkv.__path__[0]},
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "platform": platform.platform(),
            "executable": sys.executable,
        },
        "packages": _packages(),
        "machine": {"architecture": platform.machine(), **_machine_facts()},
        "backends": _backend_states(),
    }
    if options.json:
        return json.dumps(about, indent=2, allow_nan=False) + "\n"
    page = Page()
    table = Table.grid(padding=(0, 2, 0, 0))
    for part, rows in about.items():
        table.add_row(Text(part, style="bold"))
        for label, text in rows.items():
            table.add_row(Text(f"  {label}"), Text(page.token(text, 500), overflow="fold"))
    return page.render(table)


def _packages() -> dict[str, str]:
    """The versions of what qkv needs, and of what it works with."""
    versions = {name: _package_version(name) for name in (*_PACKAGES, *_OPTIONAL)}
    return {n: v for n, v in versions.items() if n in _PACKAGES or v != _MISSING}


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return _MISSING


_MISSING = "not installed"


def _machine_facts() -> dict[str, str]:
    """What the compiled backend detects of this machine, or why it cannot run."""
    try:
        from qkv.backends.cpu import describe_host

        return describe_host()
    except QkvError as error:
        return {"compiled code": f"none: {error.fact}"}
    except (ImportError, OSError) as error:
        return {"compiled code": f"none: {error}"}


def _backend_states() -> dict[str, str]:
    """Each backend, and what it says to a small float32 problem."""
    row = np.ones((1, 1), np.float32)
    try:
        plan = qkv.plan(row, row, row)
    except ArgumentError as error:
        # The environment requests an instruction set that this machine lacks.
        return {"cpu": error.fact}
    states = {plan.backend: "ready, the first choice for float32"}
    for name, refusals in plan.refusals.items():
        states[name] = "; ".join(map(str, refusals)) or "ready"
    for name, reason in broken_backends().items():
        states[name] = f"cannot be loaded: {reason}"
    return states
