"""The lab inside of the site: the file that `qkv lab --model tiny --export` writes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import qkv.cli


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the site with the page of the lab, which `live-lab.md` frames."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lab.html"
        if qkv.cli.main(["lab", "--model", "tiny", "--export", str(path)]):
            raise PluginError("qkv lab could not write its page; its message is above.")
        page = path.read_text(encoding="utf-8")
    files.append(File.generated(config, "live/lab.html", content=page))
    return files
