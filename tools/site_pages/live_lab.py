"""The lab inside of the site: the file that `qkv lab --model tiny --export` writes."""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import qkv.cli


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the site with the page of the lab, which `live-lab.md` frames."""
    files.append(File.generated(config, "live/lab.html", content=exported()))
    return files


@functools.cache
def exported() -> str:
    """The page as `qkv lab` exports it; once in a process, as `mkdocs serve` builds often."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lab.html"
        with contextlib.redirect_stdout(io.StringIO()):
            failed = qkv.cli.main(["lab", "--model", "tiny", "--export", str(path)])
        if failed:
            raise PluginError("qkv lab could not write its page; its message is above.")
        return path.read_text(encoding="utf-8")
