"""The examples give on two processes what they give on one."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(_rank: int, ranks: int, steps: int) -> Any:
    example = runpy.run_path(str(EXAMPLES / "distributed_training_step.py"))
    return example["main"](steps=steps)


@pytest.mark.slow
def test_the_example_has_the_losses_of_one_process(group: Any) -> None:
    alone = group(1)(losses, 12)[0]
    together = group(2)(losses, 12)
    assert alone[-1] < alone[0]
    for of_rank in together:
        assert of_rank == pytest.approx(alone, rel=1e-4)


def heads(_rank: int, _ranks: int, length: int) -> Any:
    example = runpy.run_path(str(EXAMPLES / "inspecting_over_ranks.py"))
    return [dict(row) for row in example["main"](length)]


@pytest.mark.slow
def test_the_heads_are_those_of_one_process(group: Any) -> None:
    alone = group(1)(heads, 96)[0]
    assert len(alone) == 8
    for table in group(2)(heads, 96):
        for row, right in zip(table, alone, strict=True):
            assert (row["layer"], row["head"]) == (right["layer"], right["head"])
            for score, mean in right.items():
                if isinstance(mean, float):
                    assert row[score] == pytest.approx(mean, rel=1e-5, abs=1e-6), score
