"""Pages that lie outside docs/, and links to files of the repository, as the site has them.

A page is written for whoever reads it in the repository, with links that work there. Here each link
is led to where its file is in the site: a page, a notebook, or a page that shows the file's text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
}
"""Pages outside docs/, and their names in the site."""

LINK = re.compile(r"(?P<code>^```.*?^```|`[^`\n]+`)|(?<=\]\()(?P<target>[^)\s]+)", re.S | re.M)
FENCE = re.compile(r"^(```\w+) .*$", re.M)
"""The first line of a block of code that says more than its language, which tests read."""

LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".yml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of docs/, the pages outside of it, and each file that a page names."""
    for path, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    for path in sorted(linked_files(files)):
        name = place(path)
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with links that work in the site, and blocks of code that are seen as such."""
    here = page.file.src_uri

    def led(found: re.Match[str]) -> str:
        path = named(found, here)
        if path is None:
            return found[0]
        anchor = found["target"].partition("#")[1:]
        return posixpath.relpath(place(path), posixpath.dirname(here) or ".") + "".join(anchor)

    return FENCE.sub(r"\1", LINK.sub(led, markdown))


def place(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples/notebooks/"):
        return f"notebooks/{Path(path).stem}.md"
    return f"files/{path}.md"


def origin(name: str) -> str:
    """The file of the repository from which a page of the site is."""
    outside = {place: path for path, place in PAGES.items()}
    if name.startswith("notebooks/"):
        return f"examples/notebooks/{Path(name).stem}.ipynb"
    return outside.get(name, f"docs/{name}")


def named(found: re.Match[str], name: str) -> str | None:
    """The file of the repository that a link in a page of the site names, if it names one."""
    target = (found["target"] or "").partition("#")[0]
    if not target or "://" in target or target.startswith("data:"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin(name)), target))
    return path if (ROOT / path).is_file() else None


def linked_files(files: Files) -> set[str]:
    """The files outside docs/ that pages link to."""
    found = {
        named(link, file.src_uri)
        for file in files.documentation_pages()
        for link in LINK.finditer(file.content_string)
    }
    return {path for path in found if path is not None and not path.startswith("docs/")}


def shown(path: str) -> str:
    """A page that shows a file of the repository."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    header = f"---\nsearch: {{exclude: true}}\nhide: [navigation, toc]\n---\n# {Path(path).name}\n"
    return f"{header}\n`{path}`\n\n``````{language}\n{text}\n``````\n"
