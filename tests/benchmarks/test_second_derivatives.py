"""The benchmark of forward mode and double backward: results are compared, and then timed."""

import re

import numpy as np
import pytest

from benchmarks import second_derivatives
from qkv.errors import ArgumentError


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
def test_every_library_is_in_the_table(capsys, monkeypatch) -> None:
    monkeypatch.setattr(second_derivatives, "SHAPES", ((2, 2, 5, 4),))
    monkeypatch.setattr(second_derivatives, "ROUNDS", 1)
    assert second_derivatives.main() == 0
    lines = capsys.readouterr().out.splitlines()
    header = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert header == ["what", "of", "qkv, tensors", "torch", "qkv, JAX", "JAX"]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:]]
    assert [row[0] for row in rows] == ["forward mode", "double backward"]
    assert all(re.fullmatch(r"\d+\.\d", cell) for row in rows for cell in row[2:])


def test_a_wrong_result_is_not_timed() -> None:
    calls = {"right": lambda: [np.ones(3)], "wrong": lambda: [np.array([1, 1, 1.1])]}
    with pytest.raises(ArgumentError, match="wrong differs by"):
        second_derivatives._milliseconds(calls)
