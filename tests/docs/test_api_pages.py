"""Every public name and every command is in the reference, and every page in the navigation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import qkv
import qkv.cli

ROOT = Path(__file__).parents[2]
DOCS, API = ROOT / "docs", ROOT / "docs" / "api"
SOURCE = Path(qkv.__file__).parent

MODULES = {*qkv._LAZY, "backends", "positions", "testing", "variants"}
"""The public modules below `qkv`; some need a package that is not installed everywhere."""

RE_EXPORTED = {"positions", "variants"}
"""Modules whose names the reference has as those of `qkv`, where `qkv` has them."""


def listed(text: str) -> list[str]:
    """The names in the literal `__all__` of a module."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise AssertionError("a public module says in __all__ what is public")


def public() -> Iterator[str]:
    yield from (f"qkv.{name}" for name in qkv.__all__)
    for module in sorted(MODULES):
        for name in listed((SOURCE / module / "__init__.py").read_text(encoding="utf-8")):
            if module in RE_EXPORTED and name in qkv.__all__:
                continue
            # A reader of the source takes a name that is also a file for the file.
            hidden = (SOURCE / module / f"{name}.py").exists() or (SOURCE / module / name).exists()
            yield f"qkv.{module}.{name}" + f".{name}" * hidden


def test_the_reference_has_every_public_name_once() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted(API.glob("*.md")))
    named = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert sorted(set(public()) - set(named)) == [], "add them to a page of docs/api"
    assert sorted(named) == sorted(set(named))


def test_the_reference_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (API / "command-line.md").read_text(encoding="utf-8")
    assert qkv.cli.main(["--help"]) == 0
    _, _, commands = capsys.readouterr().out.partition("  COMMAND\n")
    names = re.findall(r"^    (\w+) ", commands.partition("\n\n")[0], re.MULTILINE)
    assert "inspect" in names
    assert re.findall(r"^## qkv (\w+)$", page, re.MULTILINE) == names


def test_the_navigation_has_every_page() -> None:
    listed = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    named = {page.relative_to(DOCS) for entry in listed for page in DOCS.glob(entry)}
    pages = {page.relative_to(DOCS) for page in DOCS.rglob("*.md")}
    assert sorted(pages - named) == [], "add them to nav in mkdocs.yml"
    notebooks = {f"notebooks/{path.stem}.md" for path in ROOT.glob("examples/notebooks/*.ipynb")}
    assert sorted(notebooks - set(listed)) == [], "add them to nav in mkdocs.yml"
