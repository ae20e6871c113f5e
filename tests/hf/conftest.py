"""Every test here draws from torch's generator as from a new one."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch = sys.modules.get("torch")  # not there where these tests are skipped
    if torch is not None:
        torch.manual_seed(0)
