"""Every Python block of the README and the guides runs on its own, and prints what is shown."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from qkv.backends import backends, unregister

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/add-a-variant.md",
    "docs/add-a-backend.md",
    "docs/comparisons.md",
    "docs/cost.md",
    "docs/errata.md",
    "docs/exercises.md",
    "docs/caches.md",
    "docs/inspect-models.md",
    "docs/lab.md",
    "docs/paged-and-quantized.md",
    "docs/positions.md",
    "docs/trace.md",
]


PAGES += sorted(
    f"docs/mechanisms/{page.name}"
    for page in ROOT.glob("docs/mechanisms/*.md")
    if page.name != "README.md"
)


BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", re.DOTALL)
"""A block of Python, and the text block right behind it, which is what it prints."""


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


@pytest.mark.parametrize("page", sorted(p.relative_to(ROOT) for p in ROOT.glob("docs/**/*.md")))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
