"""Programs in processes of their own: they may fork, crash, or start without our imports."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def in_a_process(script: str, *arguments: str, **environment: str) -> str:
    """What a script prints that ends well within three minutes, or in QKV_TEST_PATIENCE times that.

    Parameters
    ----------
    script : str
        Python, indented as the text around it is.
    arguments : str
        What it finds in `sys.argv` after its name.
    environment : str
        Variables set besides those of this process.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180 * int(os.environ.get("QKV_TEST_PATIENCE", "1")),
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
