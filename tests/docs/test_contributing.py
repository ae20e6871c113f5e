"""The table of places in CONTRIBUTING.md names files that exist, and what they hold."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import qkv

ROOT, SOURCE = Path(__file__).parents[2], Path(qkv.__file__).parent
ROWS = re.findall(r"^\| .+ \|$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)[1:]
PATHS = [path for row in ROWS for path in re.findall(r"`([\w./]+(?:\.py|/))`", row)]
NAMES = [
    (name, path)
    for row in ROWS
    for names, path in re.findall(r"((?:`[\w.]+`(?:, | and )?)+) in `([\w./]+)`", row)
    for name in re.findall(r"`([\w.]+)`", names)
]


def files(path: str) -> list[Path]:
    """The files with this path, or with this end of a path in the package."""
    found = [ROOT / path, SOURCE / path, *SOURCE.rglob(path.rstrip("/"))]
    return [each / "__init__.py" if each.is_dir() else each for each in found if each.exists()]


def defined(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """The functions, classes and values of a module or class by name."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return found


def holds(file: Path, name: str) -> bool:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for part in name.split("."):
        if part not in defined(body):
            return False
        body = getattr(defined(body)[part], "body", [])
    return True


@pytest.mark.parametrize("path", PATHS)
def test_a_file_is_there(path: str) -> None:
    assert files(path)


@pytest.mark.parametrize(("name", "path"), NAMES)
def test_a_name_is_in_its_file(name: str, path: str) -> None:
    assert any(holds(file, name) for file in files(path))


def test_the_table_is_read() -> None:
    assert len(PATHS) > 50
    assert ("delta_function", "backward/query_rows.py") in NAMES
    assert ("EMITTERS", "backends/cpu/compiler/stored_kernels.py") in NAMES
