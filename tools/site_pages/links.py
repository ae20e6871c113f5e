"""Checks of the built site: links lead somewhere, and nothing is loaded from elsewhere.

MkDocs checks the links of Markdown. This reads the HTML that is served, in which there are also
links of docstrings, of notebooks and of the theme.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger

LOADED = {"script", "img", "iframe", "source", "video", "audio", "embed", "object"}
LEADS_ALONG = {"alternate", "canonical", "next", "prev"}
"""Kinds of `<link>` that name a page; all others are loaded."""

ADDRESS_IN_STYLE = re.compile(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)")

log = get_plugin_logger("links")


class Links(HTMLParser):
    """The targets of a page, the names inside of it, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.targets: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.names |= {name for key in ("id", "name") if (name := values.get(key))}
        if tag == "link" and values.get("rel") not in LEADS_ALONG and values.get("href"):
            self.loads.append(values["href"] or "")
        for key in ("href", "src", "data", "poster"):
            target = values.get(key)
            if target and (key != "data" or tag == "object"):
                self.targets.append(target)
                if key != "href" and tag in LOADED:
                    self.loads.append(target)


def on_post_build(config: MkDocsConfig) -> None:
    """Warn, which a strict build takes as an error, of every fault of the site."""
    for fault in faults(Path(config.site_dir)):
        log.warning(fault)


def faults(site: Path) -> list[str]:
    """What is wrong in a built site, one sentence each."""
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, page in sorted(pages.items()):
        if path.name == "404.html":
            continue  # A host shows it at any address, so its links begin at the top.
        name = path.relative_to(site).as_posix()
        found += [f"{name} loads {load} from elsewhere" for load in page.loads if outside(load)]
        for target in sorted(set(page.targets)):
            if outside(target) or re.match(r"(data|mailto|javascript):", target):
                continue
            address, anchor = urldefrag(target)
            there = (path.parent / unquote(address)).resolve() if address else path
            there = there / "index.html" if there.is_dir() else there
            if target.startswith("/") or not there.is_file():
                found.append(f"{name} links to {target}, where nothing is")
            elif anchor and there in pages and unquote(anchor) not in pages[there].names:
                found.append(f"{name} links to {target}, which has no such part")
    for path in sorted(site.rglob("*.css")):
        for address in ADDRESS_IN_STYLE.findall(path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(site).as_posix()} loads {address} from elsewhere")
    return found


def outside(target: str) -> bool:
    """Whether a target is on another host."""
    return target.startswith(("http://", "https://", "//"))
