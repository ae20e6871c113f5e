"""A plugin of pytest: tests in an order of their own each day, until the time is over.

QEMU is so slow that only some of the tests can be run in a few minutes. Conformance cases are the
first, and are always run. An order and not a number of the others is chosen, so that a slow machine
takes no longer than a fast one.
"""

from __future__ import annotations

import os
import time
from random import Random

import pytest

_FIRST = "test_instruction_sets.py"
_END = time.monotonic() + float(os.environ["QKV_AARCH64_SECONDS"])
_left: list[str] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mix the tests by the seed, behind the conformance cases."""
    Random(config.getoption("sample_seed")).shuffle(items)
    items.sort(key=lambda item: item.path.name != _FIRST)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leave out a test that would begin too late; True tells pytest that it was dealt with."""
    if time.monotonic() < _END or item.path.name == _FIRST:
        return None
    _left.append(item.nodeid)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many were left out; this line is read by who started pytest."""
    terminalreporter.write_line(f"left for want of time: {len(_left)}")
