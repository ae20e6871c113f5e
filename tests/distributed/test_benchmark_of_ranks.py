"""`python -m benchmarks.ranks` compares what it says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import qkv


@pytest.fixture
def ranks_of_the_tests(group: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes that are there already, which fail as those of the benchmark do."""
    from benchmarks.ranks import __main__ as ranks

    class Existing:
        def __init__(self, count: int) -> None:
            self.group = group(count)

        def __call__(self, function: Any, *arguments: Any) -> list[Any]:
            self.group.begin(function, *arguments)
            found = self.group.answers()
            for succeeded, answer in found:
                if not succeeded:
                    raise RuntimeError(answer)
            return [answer for _, answer in found]

    @contextmanager
    def started(count: int, threads: int) -> Iterator[Existing]:
        assert threads == 1
        yield Existing(count)

    monkeypatch.setattr(ranks, "started", started)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    qkv.set_num_threads(None)


@pytest.mark.usefixtures("ranks_of_the_tests")
def test_speed_beside_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.ranks import __main__ as ranks

    ranks.speed(256, 1)
    said = capsys.readouterr().out
    for strategy in ranks.STRATEGIES:
        rows = re.findall(rf"two ranks, {strategy} .* of its speed, .* of its work", said)
        assert len(rows) == 2  # Forward, and with the backward pass.
    assert len(re.findall("torch's context_parallel", said)) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_of_the_tests")
def test_predictions_beside_the_clock(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.ranks import __main__ as ranks

    ranks.prediction(256, 1)
    said = capsys.readouterr().out
    assert re.search(r"one thread: .* GFLOP/s .* one link: .* GB/s", said)
    assert len(re.findall(r"^ +[124]  (?:ring|gather|ulysses) .* s .* s ", said, re.MULTILINE)) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured by Linux's /proc")
@pytest.mark.usefixtures("ranks_of_the_tests")
@pytest.mark.slow
def test_memory_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.ranks import __main__ as ranks

    ranks.memory(256, 1)
    said = capsys.readouterr().out
    assert (
        len(re.findall(r"^ +[124]  (?:ring|gather|ulysses) +\d+ +\d+ +\d+$", said, re.MULTILINE))
        == 7
    )


def test_balance_of_orders(capsys: pytest.CaptureFixture[str]) -> None:
    """2,048 rows: of two halves of a causal mask the later has three quarters of the work."""
    from benchmarks.ranks import balance

    balance.balance(2048)
    said = capsys.readouterr().out
    found = dict(re.findall(r"^one  +(\S.*?\S)  +(\S+) +\S+$", said, re.MULTILINE))
    assert found["contiguous"] == "1.87"  # The last of 8 has 15 / 8 of the mean.
    assert found["zigzag (torch: head and tail)"] == "1.00"
    assert len(found) == 6
    ours = re.findall(r"qkv.distributed.balanced +([\d.]+) +([\d.]+)$", said, re.MULTILINE)
    assert len(ours) == 4
    assert all(float(each) <= 1.05 for both in ours for each in both)
    assert "refused" in said  # torch's order by document asks for lengths that divide.
