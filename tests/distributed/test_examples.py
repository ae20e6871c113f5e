"""The examples give on two processes what they give on one."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from processes import in_a_process

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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distributed_training_step", "inspecting_over_ranks"])
def test_an_example_begins_beside_a_program_that_has_the_port_of_torchrun(name: str) -> None:
    said = in_a_process(
        """
        import os, runpy, socket, sys
        import torch.distributed as dist
        taken = socket.socket()
        try:
            taken.bind(("0.0.0.0", 29500))
            taken.listen()
        except OSError:
            pass  # Another program has it already.
        begin = dist.init_process_group

        def begin_alone(*given):
            begin(*given)
            print("begun", flush=True)
            os._exit(0)

        dist.init_process_group = begin_alone
        runpy.run_path(sys.argv[1], run_name="__main__")
        """,
        str(EXAMPLES / f"{name}.py"),
    )
    assert said == "begun\n"
