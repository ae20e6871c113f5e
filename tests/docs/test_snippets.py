"""Every Python block of the README and the guides runs, and prints no warning."""

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


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before = {backend.name for backend in backends()}
    try:
        runpy.run_path(str(script))
    finally:
        for backend in backends():
            if backend.name not in before:
                unregister(backend.name)


@pytest.mark.parametrize("page", sorted(p.relative_to(ROOT) for p in ROOT.glob("docs/**/*.md")))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
