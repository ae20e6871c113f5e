"""How the reference is found and reads: first in searches, with names that lead to it."""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

NAME = re.compile(
    r"(?P<whole><(?P<tag>a|pre|h[1-6])\b.*?</(?P=tag)>)"
    r"|<code>(?P<name>qkv(?:\.\w+)+)(?P<call>\([^<]*\))?</code>",
    re.DOTALL,
)
"""Code that is one public name, outside of links, headings and blocks."""

NOTHING = re.compile(r'–\s*<div class="doc-md-description">\s*</div>')
"""What is said of a parameter that is described by its name and type alone."""

BOOSTS = {
    "api/attention": 9.0, "api/variants": 9.0, "api/results": 9.0, "api/": 3.0,
    "adr/": 0.5, "CHANGELOG": 0.3,
}  # fmt: skip
"""How much more a search values pages whose names begin so; the first that fits. Names of `qkv`
itself come before those of its modules."""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page, with its place in searches said where the search reads it."""
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta.setdefault("search", {"boost": boost})
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links to the reference, which mkdocs-autorefs fills in where there is one."""
    html = html.replace(
        '<a href="" id=', "<a id="
    )  # A place that is linked to is not a link itself.
    return NAME.sub(linked, NOTHING.sub("", html))


def linked(found: re.Match[str]) -> str:
    """The name inside of a reference that may stay unresolved."""
    if found["whole"]:
        return found[0]
    return f'<autoref identifier="{found["name"]}" optional>{found[0]}</autoref>'
