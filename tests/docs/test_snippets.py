"""Every Python block of the README and the guides runs on its own, and prints what is shown."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from qkv.backends import backends, unregister

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"docs/migrate.md"}
"""Pages whose blocks another test runs."""

FENCE = "```python"
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)
"""A block of Python, and the text block right behind it, which is what it prints."""

MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PAGES = [
    str(page.relative_to(ROOT))
    for page in MARKDOWN
    if FENCE in page.read_text(encoding="utf-8")
    and page.relative_to(ROOT).as_posix() not in ELSEWHERE
]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_each_python_block_runs_on_its_own(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert blocks
    monkeypatch.chdir(tmp_path)
    for n, (block, shown) in enumerate(blocks):
        script = tmp_path / f"block_{n}.py"
        script.write_text(block, encoding="utf-8")
        before = {backend.name for backend in backends()}
        try:
            runpy.run_path(str(script))
        finally:
            for backend in backends():
                if backend.name not in before:
                    unregister(backend.name)
        printed = capsys.readouterr().out
        if shown:
            assert printed == shown


@pytest.mark.parametrize("page", [page.relative_to(ROOT) for page in MARKDOWN])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target


README = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("n", range(len(README)))
def test_a_block_of_the_readme_runs_in_a_new_interpreter(n: int, tmp_path: Path) -> None:
    """A stranger pastes it so: nothing was imported before, and nothing warns."""
    block, shown = README[n]
    ran = subprocess.run(
        [sys.executable, "-"],
        input=block,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, shown, "")


@pytest.mark.parametrize("folder", ["src", "docs", "examples", "benchmarks", "README.md"])
def test_nobody_is_told_to_install_from_an_index(folder: str) -> None:
    """The package is on none yet: every command installs a checkout, or extras of what is there."""
    place = ROOT / folder
    files = [place] if place.is_file() else [*place.rglob("*.py"), *place.rglob("*.md")]
    files = [file for file in files if file.name != "extras.py"]
    told = re.compile(r"""pip install (?:-\w+ )*["']?qkv\b""")
    assert not [str(file) for file in files if told.search(file.read_text(encoding="utf-8"))]


def test_the_page_about_installing_leads_to_the_build_of_torch_for_processors() -> None:
    """The one of PyPI brings gigabytes along that a machine without a GPU never reads."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## torch on a machine without a GPU\n(.*?)^## ", page, re.M | re.S)
    first, _, then = " ".join(section.split()).partition("pytorch.org")
    assert "Install torch's build for processors first" in first
    assert "CPU" in then
    assert 'pip install -e ".[hf]"' in then
