"""The training step of the examples trains."""

import math
import runpy
from pathlib import Path

import pytest

pytest.importorskip("jax", minversion="0.10", reason="compared with jax 0.10 or later")


@pytest.mark.slow
def test_the_loss_falls(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "examples" / "jax_training_step.py"
    example = runpy.run_path(str(path))
    first, last = example["main"](steps=80)
    guessing = math.log(example["VOCABULARY"])
    assert first > guessing > 1.05 * last
    assert "loss" in capsys.readouterr().out
