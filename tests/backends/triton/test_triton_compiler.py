"""Kernels in Triton are of the types that its compiler asks for, with any argument."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("compile_forms.py")


@pytest.mark.slow
def test_kernels_are_compiled_with_every_kind_of_argument(tmp_path):
    # Kernels are made for the interpreter or for a GPU when they are imported.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
