"""What is slow takes turns: one run takes some of the cases of a large suite, and a twelfth of the
tests that take seconds."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar
from zlib import crc32

import pytest

T = TypeVar("T")

SLOW_TESTS_ONE_IN = 12
"""Runs that share out the slow tests: those with the seeds 12 n to 12 n + 11 for any n."""


def sample(config: pytest.Config, cases: Sequence[T], one_in: int) -> list[T]:
    """One in `one_in` of the cases, in their order.

    `--sample-seed` says which: as many seeds that follow one another take every case once. All of
    them are taken with `--every-case`, and where a test is named on the command line, since that
    test would otherwise be missing from most runs.
    """
    if config.getoption("every_case") or any("::" in argument for argument in config.args):
        return list(cases)
    one_in = max(1, min(one_in, len(cases)))
    mixed = Random(0).sample(range(len(cases)), len(cases))
    first = config.getoption("sample_seed") % one_in
    return [cases[n] for n in sorted(mixed[first::one_in])]


def is_turn_of(item: pytest.Item) -> bool:
    """Whether a slow test is in this run, which `--sample-seed` says.

    It always is with `--every-case`, and where its file is named on the command line.
    """
    config = item.config
    named = (config.invocation_params.dir / each.partition("::")[0] for each in config.args)
    if config.getoption("every_case") or any(item.path == path.resolve() for path in named):
        return True
    # Others in each round of seeds, so that every case of a suite that is sampled too has its turn.
    turns, seed = divmod(config.getoption("sample_seed"), SLOW_TESTS_ONE_IN)
    return (crc32(f"{turns} {item.nodeid}".encode()) + seed) % SLOW_TESTS_ONE_IN == 0
