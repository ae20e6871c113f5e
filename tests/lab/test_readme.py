"""The README leads a new reader to the running lab."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_command_that_the_readme_gives_opens_the_lab() -> None:
    """The command installs what the server needs where the lab then starts, and serves a page."""
    blocks = re.findall(r"```\n(.*?)```", README, re.DOTALL)
    (line,) = [line for block in blocks for line in block.splitlines() if "qkv lab" in line]
    install, started = (shlex.split(part) for part in line.split("&&"))
    assert install[:2] == [".venv/bin/pip", "install"]
    extra = install[-1].removeprefix(".[").removesuffix("]")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = " ".join(project["optional-dependencies"][extra])
    files = (ROOT / "src" / "qkv" / "lab" / "serving").glob("*.py")
    server = "\n".join(file.read_text(encoding="utf-8") for file in files)
    imported = set(re.findall(r"^ *(?:import|from) (starlette|uvicorn)\b", server, re.MULTILINE))
    assert imported == {"starlette", "uvicorn"}
    assert all(name in needed for name in imported)

    assert started[0] == ".venv/bin/qkv"
    command = [sys.executable, "-u", "-m", "qkv", *started[1:], "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            browser = build_opener(HTTPCookieProcessor(CookieJar()))
            with browser.open(address, timeout=60) as answer:
                page = answer.read().decode()
        finally:
            process.terminate()
    assert 'id="qkv-data"' in page
