"""Notebooks run from the first cell to the last."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("default")  # Jupyter's own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit without outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any(cell.get("outputs") for cell in notebook.cells)


def test_there_are_some() -> None:
    assert len(NOTEBOOKS) >= 2
