"""Ctrl-C while the program starts: no traceback, and the exit code of an interrupted program."""

from __future__ import annotations

import subprocess
import sys

import pytest


def interrupted(
    module: str, handler: str = "signal.default_int_handler"
) -> subprocess.CompletedProcess[str]:
    """The program, which gets Ctrl-C as it begins to import a module."""
    program = f"""
import os, signal, sys
signal.signal(signal.SIGINT, {handler})
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["qkv", "inspect", "--head", "0"]
from qkv_command import main
sys.exit(main())
"""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.skipif(sys.platform == "win32", reason="no signal to send to oneself there")
@pytest.mark.parametrize(
    "module", ["qkv", "numpy", "numpy._core", "qkv.cli", "qkv.cli.inspect_command", "rich.table"]
)
def test_ctrl_c_while_modules_are_imported(module: str) -> None:
    ran = interrupted(module)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="no signal to send to oneself there")
def test_a_program_of_the_background_goes_on() -> None:
    """Shells let those ignore Ctrl-C."""
    ran = interrupted("numpy", "signal.SIG_IGN")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "entropy" in ran.stdout
