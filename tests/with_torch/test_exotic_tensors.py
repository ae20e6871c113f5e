"""Tensors that are not dense numbers in memory: each works, or raises an error of qkv's own.

Before a call like it was prepared, and after. In a process of its own: what torch's C++ code throws
where Python does not catch it ends the process, as a nested tensor did, and memory that is not
there does, as that of a freed storage was not.
"""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("exotic_tensors.py")


def test_exotic_tensors() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "finished\n"
