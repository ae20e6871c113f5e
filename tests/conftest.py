"""Long runs on request; the user's kernel cache is left alone: that of tests lies with pytest's."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    long = parser.getgroup("long runs")
    long.addoption(
        "--fuzz", type=int, default=320, metavar="N", help="random problems (default: 320)"
    )
    long.addoption("--fuzz-seed", type=int, default=0, metavar="N", help="their seed (default: 0)")
    long.addoption(
        "--every-case", action="store_true", help="instruction sets and threads: no sampling"
    )


def pytest_configure(config: pytest.Config) -> None:
    cache = getattr(config, "cache", None)  # none with -p no:cacheprovider
    if cache is not None:
        os.environ["QKV_CACHE_DIR"] = str(cache.mkdir("kernels"))
