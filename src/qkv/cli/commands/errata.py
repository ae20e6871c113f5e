"""`qkv errata`: what the classical teaching texts print wrongly."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = "Each with what is right and why; with its name, also code that shows it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="only this one, with its code")
    parser.add_argument("--json", action="store_true", help="strict JSON")


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    from qkv.errata import ERRATA, erratum
    from qkv.inspection.summaries.terminal import Page

    chosen = ERRATA if options.name is None else (erratum(options.name),)
    if options.json:
        return json.dumps([asdict(entry) for entry in chosen], indent=2, ensure_ascii=True) + "\n"
    page = Page()
    parts: list[RenderableType] = []
    for entry in chosen:
        parts += [
            Text(entry.name, style="bold"),
            Text(f"{entry.text}: {entry.what}"),
            _labelled(printed=entry.printed, right=entry.right, why=entry.why),
            Text(),
        ]
        if options.name is not None:
            parts.append(Text(entry.shown_by, no_wrap=True))
    return page.render(*parts)


def _labelled(**texts: str) -> Table:
    """Texts beside their names; lines that go on stay in their column."""
    grid = Table.grid(padding=(0, 2))
    for name, text in texts.items():
        grid.add_row(f"  {name}", Text(text))
    return grid
