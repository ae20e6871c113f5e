"""Ctrl-C while the program starts: no traceback, and the exit code of an interrupted program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def heeds_ctrl_c() -> Iterator[None]:
    """Processes that are started here heed Ctrl-C, also where these tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
    "module", ["qkv", "numpy", "numpy._core", "qkv.cli", "qkv.cli.commands.inspect", "rich.table"]
)
def test_ctrl_c_while_modules_are_imported(module: str) -> None:
    ran = interrupted(module)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


@pytest.mark.skipif(sys.platform == "win32", reason="no signal to send to oneself there")
@pytest.mark.parametrize("module", ["numpy", "qkv.errors", "qkv.cli", "rich.table"])
def test_ctrl_c_while_a_package_is_imported_to_be_run(module: str, tmp_path: Path) -> None:
    """`python -m qkv` imports qkv, and so NumPy, before the program begins."""
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
""")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-m", "qkv", "inspect", "--head", "0"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


def test_importing_the_package_leaves_ctrl_c_alone() -> None:
    program = "import signal, qkv; print(signal.getsignal(2) is signal.default_int_handler)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ran.stdout.split() == [b"True"]


@pytest.mark.skipif(sys.platform == "win32", reason="no signal to send to oneself there")
def test_a_program_of_the_background_goes_on() -> None:
    """Shells let those ignore Ctrl-C."""
    ran = interrupted("numpy", "signal.SIG_IGN")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "entropy" in ran.stdout
