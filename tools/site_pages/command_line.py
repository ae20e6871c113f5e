"""What `--help` prints, below each heading of a command in `api/command-line.md`."""

from __future__ import annotations

import contextlib
import io
import os
import re
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

import qkv.cli


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page of the command line with all that its commands print for `--help`."""
    if page.file.src_uri != "api/command-line.md":
        return markdown
    return re.sub(
        r"^## qkv ?(\w*)$",
        lambda found: f"{found[0]}\n\n```text\n{help_of(found[1])}\n```",
        markdown,
        flags=re.MULTILINE,
    )


def help_of(command: str) -> str:
    """What a command prints for `--help`, for a window of 88 columns without colours."""
    printed = io.StringIO()
    columns = {"COLUMNS": "88", "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, columns), contextlib.redirect_stdout(printed):
        if qkv.cli.main([command, "--help"] if command else ["--help"]):
            raise PluginError(f"api/command-line.md has a heading for {command}, no command.")
    return printed.getvalue().rstrip()
