"""Which packages a test file needs, read from its text, for places where not all can be had."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PATTERNS = {
    "torch": r"\btorch\b|\bqkv\.hf\b|README\.md",
    "llvmlite": r"\bllvmlite\b|backends\.cpu|instruction_sets|[\"']cpu[\"']",
    "build": r"^from build\b",
    "importlinter": r"\bimportlinter\b",
    "triton": r"backend=[\"']triton[\"']|\bimport triton\b|torch\.triton\b|benchmarks import gpu",
    "array_api_compat": r"\barray_api_compat\b|qkv\.mechanisms\b",
    **{
        name: rf"\b{name}\b"
        for name in (
            "jax", "transformers", "hypothesis", "matplotlib", "starlette", "uvicorn",
            "jsonschema", "nbclient", "playwright", "anywidget", "expecttest", "threadpoolctl",
        )
    },
}  # fmt: skip
"""Packages of the extras, and what a test that needs one has somewhere in its text."""


@cache
def needed(path: Path) -> frozenset[str]:
    """The packages that a test file needs, or what it takes of the tests, or its conftest.py.

    A folder needs what its conftest.py does. The conftest.py of all tests needs none.
    """
    found: set[str] = set()
    seen: set[Path] = {TESTS / "conftest.py"}
    left = [path / "conftest.py" if path.is_dir() else path]
    while left:
        file = left.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        text = file.read_text(encoding="utf-8")
        found |= {name for name, what in PATTERNS.items() if re.search(what, text, re.MULTILINE)}
        folders = [folder for folder in file.parents if folder.is_relative_to(TESTS)]
        left += [folder / "conftest.py" for folder in folders]
        imported = re.findall(r"^\s*(?:from|import) ([\w.]+)", text, re.MULTILINE)
        # A test names a module that it runs in a process of its own in a string.
        imported += re.findall(r"\btests\.[\w.]+", text)
        for name in imported:
            module = name.removeprefix("tests.").strip(".").replace(".", "/")
            for folder in folders:
                left += [folder / f"{module}.py", folder / module / "__init__.py"]
    return frozenset(found)


def missing(path: Path) -> list[str]:
    """The packages that a test file needs and that are not installed."""
    return sorted(name for name in needed(path) if importlib.util.find_spec(name) is None)
