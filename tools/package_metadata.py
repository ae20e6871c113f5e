"""The metadata of the package that needs the project's public address.

A package index shows the README by itself, where relative links and pictures lead nowhere. With
`repository` set in pyproject.toml they become absolute, and the project has URLs; while it is empty
the README is taken as it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURES = (".svg", ".png")
TARGET = re.compile(r'```.*?```|(?<=\]\()[^)\s]+|(?<=src=")[^"]+|(?<=href=")[^"]+', re.DOTALL)
"""Where a link or a picture leads to; code is matched as well, so that it is left alone."""


class PackageMetadata(MetadataHookInterface):
    """The README and the URLs of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        address = self.config["repository"].rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        if address:
            if not address.startswith("https://"):
                raise ValueError(
                    f"repository = {address!r} in pyproject.toml is not a https address. "
                    "Write all of it, as in https://example.org/group/project"
                )
            text = TARGET.sub(lambda found: absolute(address, found[0]), text)
            metadata["urls"] = {
                "Repository": address,
                "Documentation": f"{address}/tree/HEAD/docs",
                "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(address: str, target: str) -> str:
    """A link target below the address; code, parts of a page and whole addresses stay."""
    if target.startswith(("```", "#")) or "://" in target:
        return target
    kind = "raw" if target.endswith(PICTURES) else "blob"
    return f"{address}/{kind}/HEAD/{target}"
