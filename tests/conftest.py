"""Tests leave the user's kernel cache alone: theirs lies with pytest's."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    cache = getattr(config, "cache", None)  # none with -p no:cacheprovider
    if cache is not None:
        os.environ["QKV_CACHE_DIR"] = str(cache.mkdir("kernels"))
