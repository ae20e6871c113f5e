"""Suites in which nearly every case is a kernel to compile: one run takes some of their cases."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

import pytest

T = TypeVar("T")


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
