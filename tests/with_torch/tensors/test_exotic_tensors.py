"""Tensors that are not dense numbers in memory: each works, or raises an error of qkv's own.

Before a call like it was prepared, and after. In a process of its own: what torch's C++ code throws
where Python does not catch it ends the process, as a nested tensor did, and memory that is not
there does, as that of a freed storage was not.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import qkv

SCRIPT = Path(__file__).with_name("exotic_tensors.py")


@pytest.mark.slow
def test_exotic_tensors() -> None:
    path = os.pathsep.join(sys.path)  # The script imports helpers of other tests.
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "finished\n"


X = torch.ones(1, 2, 8, 8)
WITHOUT_SHAPE: dict[str, Callable[[], torch.Tensor]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)]),
    "uninitialised": torch.nn.parameter.UninitializedParameter,
}
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "score": lambda t: qkv.attention(X, X, X, qkv.ScoreMod(lambda s, b, h, i, j: s + t[i])),
    "append": lambda t: qkv.cache.PagedCache(page_size=4).append(t, t),
    "rotate": lambda t: qkv.RoPE().rotate(t, 0),
    "sinusoidal": qkv.SinusoidalPositions(8),
    "learned": qkv.LearnedPositions,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", WITHOUT_SHAPE)
@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_without_a_shape_is_refused(name: str, kind: str) -> None:
    with pytest.raises(qkv.QkvError):
        CALLS[name](WITHOUT_SHAPE[kind]())
