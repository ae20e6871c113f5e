"""The examples that look into heads say what they promise."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_tiny_model_has_an_induction_head(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "induction_heads.py"))["main"]()
    out = capsys.readouterr().out
    assert "most previous   layer 0" in out
    assert "most induction  layer 1" in out


def test_statistics_without_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "long_context_statistics.py"))
    example["main"](600)
    lines = capsys.readouterr().out.splitlines()
    kinds = [line.split()[2] for line in lines[-12:]]
    assert [head for head, kind in enumerate(kinds) if kind == "previous"] == [example["PREVIOUS"]]
    assert [head for head, kind in enumerate(kinds) if kind == "induction"] == [
        example["INDUCTION"]
    ]
