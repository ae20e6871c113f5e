"""Notebooks run from the first cell to the last, and are stored with what they show.

`jupyter execute --inplace examples/notebooks/*.ipynb` stores it anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Jupyter's own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    stored, sizes = [shapes(cell) for cell in notebook.cells], kilobytes(notebook)
    assert any(stored), "commit with outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [shapes(cell) for cell in notebook.cells] == stored
    assert kilobytes(notebook) == pytest.approx(sizes, rel=0.1)


def kilobytes(notebook: Any) -> list[float]:
    """Sizes of files that are printed; they are nearly the same on all machines."""
    printed = [each.get("text", "") for cell in notebook.cells for each in cell.get("outputs", [])]
    return [float(size) for size in re.findall(r"([0-9.]+) kB", "".join(printed))]


def shapes(cell: Any) -> list[tuple[str, ...]]:
    """The kinds of the outputs of a cell; their digits may differ between machines."""
    found = [
        (each["output_type"], *sorted(each.get("data", {}))) for each in cell.get("outputs", [])
    ]
    # What is printed comes in one piece or in several.
    return [
        each for i, each in enumerate(found) if each != ("stream",) or found[i - 1 : i] != [each]
    ]


@pytest.mark.parametrize("name", ["a_student", "a_teacher", "a_researcher"])
def test_there_is_one_for_each_reader_with_figures(name: str) -> None:
    (path,) = (path for path in NOTEBOOKS if path.stem == name)
    notebook = nbformat.read(path, as_version=4)
    figures = [each for cell in notebook.cells for each in shapes(cell) if "image/png" in each]
    assert len(figures) >= 2
    assert 'matplotlib: `pip install -e ".[plot]"`' in notebook.cells[0]["source"]
    assert len(notebook.cells) <= 16
