"""The example trains on two processes as it does on one."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed_training_step.py"


def losses(_rank: int, ranks: int, steps: int) -> Any:
    example = runpy.run_path(str(EXAMPLE))
    return example["main"](steps=steps)


@pytest.mark.slow
def test_the_example_has_the_losses_of_one_process(group: Any) -> None:
    alone = group(1)(losses, 12)[0]
    together = group(2)(losses, 12)
    assert alone[-1] < alone[0]
    for of_rank in together:
        assert of_rank == pytest.approx(alone, rel=1e-4)
