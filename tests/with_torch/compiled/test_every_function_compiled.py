"""Nothing that reads addresses runs on what torch's compiler puts in the place of arrays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import qkv._dynamo


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensors", "arrays"])
@pytest.mark.one_in(2)
def test_every_public_function(kind: str) -> None:
    """`vjp`, `jvp` and `inspect` ended the process; `merge` and arrays of NumPy raised errors."""
    script = Path(__file__).with_name("every_function.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), kind],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split("\n")[1:] == ["done", ""], done.stdout + done.stderr[-2000:]


ORDERS = {
    "qkv first": "import qkv, torch",
    "torch first": "import torch, qkv",
    "its compiler first": "import torch._dynamo, qkv",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.one_in(2)
def test_the_compiler_is_told_whoever_imports_it(order: str) -> None:
    program = f"""
{ORDERS[order]}
import sys, qkv.call.attend, qkv.bridges.torch.calls
from torch._dynamo.trace_rules import check_file
print(check_file(qkv.call.attend.__file__).skipped)
print(check_file(qkv.bridges.torch.calls.__file__).skipped)
print(any(getattr(finder, "name", None) == "torch._dynamo.trace_rules" for finder in sys.meta_path))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr[-2000:]


def test_what_is_readable_exists() -> None:
    root = Path(qkv._dynamo.__file__).parent
    assert not [entry for entry in qkv._dynamo.READABLE if not (root / entry).exists()]
