"""Long runs on request; the user's kernel cache is left alone: that of tests lies with pytest's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from zlib import crc32

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    long = parser.getgroup("long runs")
    long.addoption(
        "--fuzz", type=int, default=320, metavar="N", help="random problems (default: 320)"
    )
    long.addoption("--fuzz-seed", type=int, default=0, metavar="N", help="their seed (default: 0)")
    long.addoption(
        "--every-case", action="store_true", help="all cases of the suites that are sampled"
    )


def pytest_configure(config: pytest.Config) -> None:
    cache = getattr(config, "cache", None)  # none with -p no:cacheprovider
    if cache is not None:
        os.environ["QKV_CACHE_DIR"] = str(cache.mkdir("kernels"))


LARGE_SUITES = ("conformance", "gradients", "hardening", "properties", "variants")


@pytest.fixture
def masks_of_few_pairs_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of many are, for what they spare."""
    from qkv.backends.cpu import schedule

    monkeypatch.setattr(schedule, "FEW_OPERATIONS", 0)


@pytest.fixture(autouse=True)
def _as_in_large_problems(request: pytest.FixtureRequest) -> None:
    """The problems of these suites are too small: every other test takes them for large ones."""
    if request.path.parent.name in LARGE_SUITES and crc32(request.node.nodeid.encode()) % 2:
        request.getfixturevalue("masks_of_few_pairs_are_read")


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of parts, and of tiles in the backward pass, wherever there can be any: the problems
    of most tests are too small.

    What was prepared for earlier calls is forgotten, before and afterwards.
    """
    from qkv import _pull_back, _recall
    from qkv.backends.cpu import backward_pass, forward_pass, gradient

    def forget() -> None:
        for module in (_recall, _pull_back):
            module._prepared.clear()
            module._seen.clear()
        _recall._growing.clear()

    forget()
    monkeypatch.setattr(forward_pass, "_PARTS_PAY", dict.fromkeys(forward_pass._PARTS_PAY, (1, 1)))
    monkeypatch.setattr(backward_pass, "_ROWS_PAY", 1)
    monkeypatch.setattr(gradient, "_FEW", 0)
    yield
    forget()


SAMPLED = {
    "test_gradients": 4,
    "test_forbidden_keys_and_values": 3,
    "test_queries_that_may_not_see_a_key": 3,
    "test_the_whole_suite": 3,
}
"""Each of their cases is a kernel or two to compile: one in so many runs, all on request."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--every-case"):
        return
    seen: dict[tuple[str, object], int] = {}
    kept, dropped = [], []
    for item in items:
        name = getattr(item, "originalname", item.name)
        if name not in SAMPLED:
            kept.append(item)
            continue
        kind = (name, item.callspec.params.get("backend"))
        number = seen[kind] = seen.get(kind, -1) + 1
        (dropped if number % SAMPLED[name] else kept).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept
