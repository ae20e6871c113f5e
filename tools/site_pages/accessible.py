"""Names and headings that the theme leaves out, for those who hear a page instead of seeing it."""

from __future__ import annotations

import re
from html import escape

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

SEARCH = '<div class="md-search" data-md-component="search" role="dialog"'
PART = re.compile(
    r'(?P<tag><nav class="md-nav" data-md-level="(?P<level>\d)") aria-labelledby="\w+"'
    r'(?P<rest>.*?<span class="md-nav__icon md-icon"></span>\s*(?P<title>[^<]+?)\s*</label>)',
    re.DOTALL,
)
"""A part of the navigation. The theme names it after a label that may be empty."""

EMPTY_HEADING = re.compile(r"<th((?: [^>]*)?)></th>")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The page with names for its search and for each part of the navigation."""
    above: list[str] = []

    def named(part: re.Match[str]) -> str:
        above[int(part["level"]) - 1 :] = [part["title"]]
        return f'{part["tag"]} aria-label="{escape(", ".join(above))}"{part["rest"]}'

    if SEARCH not in output or not PART.search(output):
        raise PluginError("the theme writes other tags; tools/site_pages/accessible.py names them.")
    output = output.replace(SEARCH, f'{SEARCH} aria-label="Search"')
    return EMPTY_HEADING.sub(r"<td\1></td>", PART.sub(named, output))
