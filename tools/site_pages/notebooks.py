"""The notebooks of examples/ as pages, with the outputs that are stored in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the site with a page for every notebook."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text = as_markdown(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return files


def as_markdown(path: Path) -> str:
    """The cells of a notebook one after the other, each with its outputs."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source.strip():
            parts.append(fence(source, "python"))
            parts += [shown_output(output) for output in cell["outputs"]]
    title, *rest = parts
    note = f"*This is `examples/notebooks/{path.name}`, with the outputs of its last run.*"
    heading, _, below = title.partition("\n")
    return "\n\n".join([heading, note, below.strip(), *rest])


def shown_output(output: dict[str, Any]) -> str:
    """An output in the richest form that needs no script."""
    if output["output_type"] == "stream":
        return fence("".join(output["text"]), "text")
    data = {kind: "".join(value) for kind, value in output["data"].items()}
    if "image/png" in data:
        image = data["image/png"].replace("\n", "")
        described = data.get("text/plain", "").splitlines()[0].strip("<>")
        return f"![The picture that this cell draws: {described}](data:image/png;base64,{image})"
    return fence(data["text/plain"], "text")


def fence(text: str, language: str) -> str:
    """A block of code, or of what code printed."""
    return f"``````{language}\n{text.rstrip()}\n``````"
