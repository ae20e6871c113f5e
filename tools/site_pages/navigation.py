"""Entries of the navigation that have a star stand for all pages that fit them, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The configuration with every page of the navigation by name."""
    config.nav = expanded(config.nav, Path(config.docs_dir))
    return config


def expanded(entry: Any, docs: Path) -> Any:
    """A part of the navigation in which stars are replaced by pages."""
    if isinstance(entry, dict):
        return {title: expanded(below, docs) for title, below in entry.items()}
    if not isinstance(entry, list):
        return entry
    found = []
    for below in entry:
        if isinstance(below, str) and "*" in below:
            found += sorted(path.relative_to(docs).as_posix() for path in docs.glob(below))
        else:
            found.append(expanded(below, docs))
    return found
