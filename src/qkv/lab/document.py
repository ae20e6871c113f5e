"""The HTML of the lab: the page that the server gives out, and one file that needs nothing else.

The file carries script, style and data inside. A content security policy in it names both by their
hashes and allows nothing else, and no connection at all. Tokens and names are inserted as
text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from qkv.errors import UnsupportedError
from qkv.files.json_numbers import json_data, numbers_of_json
from qkv.inspection.rendering.tokens import printable
from qkv.lab.messages import Answer, in_page, key_of
from qkv.lab.session import Session
from qkv.lab.sources.heads import HeadLayer, Heads
from qkv.lab.sources.source import source_of
from qkv.lab.sources.weight_map import TILE

__all__ = ["FILES", "asset", "export_data", "offline_page", "served_page", "to_html"]

FILES = {"/lab.js": "text/javascript; charset=utf-8", "/lab.css": "text/css; charset=utf-8"}
"""Files that the page loads, and their types."""

DATA_ID = "qkv-data"

_PAGE = 512
"""The number of queries whose best keys a page asks for at once."""

_MOST_QUERIES = 4 * _PAGE
"""The largest number of queries of each head whose best keys are in a file."""

_MOST_ROWS = 1 << 18
"""Queries of all heads together whose best keys are in a file, at 0.1 kB each: every head opens,
with fewer queries where there are many heads."""

_DIGITS = 8
"""Digits of weights and entropies in a file, which are float32."""

_MOST_MAP_BYTES = 32 << 20
"""Bytes of all maps in a file, at most: 256 KiB each, before base64 adds a third."""


def asset(name: str) -> str:
    """A file of the bundle, `lab.js` or `lab.css`.

    Raises
    ------
    UnsupportedError
        It is not in the package.
    """
    file = resources.files("qkv.lab").joinpath("static", name)
    if not file.is_file():
        raise UnsupportedError(
            f"the page of the lab is not in this package: {name} is missing.",
            [("looked in", "qkv/lab/static")],
            "Install a released wheel, or make it: cd lab && npm ci && npm run build.",
        )
    return file.read_text(encoding="utf-8")


def served_page(data: Mapping[str, Any]) -> str:
    """The page of the server: script and style are loaded from it."""
    head = '<link rel="stylesheet" href="/lab.css">'
    return _document(data, head, '<script type="module" src="/lab.js"></script>')


def offline_page(data: Mapping[str, Any]) -> str:
    """A self-contained HTML file, which opens from disk and loads nothing."""
    style, script = asset("lab.css"), asset("lab.js")
    # Neither may contain the end tag of its element.
    script = re.sub(r"</(?=script)", r"<\\/", script, flags=re.IGNORECASE)
    script = script.replace("<!--", "<\\!--")
    style = re.sub(r"</(?=style)", r"<\\/", style, flags=re.IGNORECASE)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    return _document(data, head, f'<script type="module">{script}</script>')


def _document(data: Mapping[str, Any], head: str, script: str) -> str:
    parts = (
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(printable(str(data['title']), 200))}</title>",
        head,
        "</head>",
        "<body>",
        '<div id="qkv-lab"></div>',
        "<noscript>The lab draws with a script, and scripts are off.</noscript>",
        f'<script type="application/json" id="{DATA_ID}">{in_page(data)}</script>',
        script,
        "</body>",
        "</html>",
    )
    return "\n".join(parts) + "\n"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")


def to_html(shown: Any = None, tokens: Sequence[str] | None = None) -> str:
    """The lab as one HTML file that works from disk, with no network.

    Parameters
    ----------
    shown : Record, ModelRecord, Trace or Source, optional
        What to show beside the examples that come with qkv.
    tokens : sequence of str, optional
        Names of the keys of a record.

    Returns
    -------
    str
        Some 1.7 MB, of which 1.3 MB are the language model, and what is shown: for each head at
        most 6 kB, 0.1 kB for each of its queries, and its map if its query and key were kept and
        have at most 256 tokens.

    Raises
    ------
    ArgumentError
        There is nothing to show of an object of this kind.

    Examples
    --------
    >>> import qkv.lab
    >>> page = qkv.lab.to_html()  # doctest: +SKIP
    >>> open("lab.html", "w").write(page)  # doctest: +SKIP
    """
    session = Session(None if shown is None else source_of(shown, tokens))
    return offline_page(export_data(session))


def export_data(session: Session, view: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything that a page can show without asking.

    Parameters
    ----------
    session : Session
    view : mapping, optional
        What is shown first, such as `{"head": 3, "query": 75}`, as an address names it.
    """
    methods = ("example", "scaling", "mechanisms", "language", "code", "errata", "exercises")
    results = session.results(*((name, {}) for name in methods))
    source = session.source
    if source is not None and source.heads is not None:
        results |= _head_results(session, source.heads)
    data = session.data("export", results)
    return {**data, "view": {**data["view"], **(view or {})}}


def _head_results(session: Session, heads: Heads) -> dict[str, Any]:
    results = session.results(("model", {}))
    # A file has no server that could run the model again.
    results["model"] |= {"can_intervene": False, "can_read": False, "others": []}
    for layer in heads.layers:
        picture = {"layer": layer.index}
        results[key_of("thumbnails", picture)] = _with_bytes(session.answer("thumbnails", picture))
    places = [(layer, head) for layer in heads.layers for head in range(layer.num_heads)]
    most = min(_MOST_QUERIES, max(_MOST_ROWS // max(len(places), 1), 1))
    for layer, head in places:
        for first in range(0, min(layer.q_len, most), _PAGE):
            asked = {"layer": layer.index, "head": head}
            if layer.q_len > _PAGE:
                asked |= {"first": first, "count": _PAGE}
            answer = session.answer("head", {"first": first, **asked, "count": min(_PAGE, most)})
            results[key_of("head", asked)] = _rounded(answer.result)
    room = _MOST_MAP_BYTES
    for layer, head in places:
        room -= 4 * layer.q_len * layer.kv_len if _is_small(layer) else 0
        if _is_small(layer) and room >= 0:
            # At level 0 an entry is one weight, so this tile serves "max" and "mean" alike.
            tile: dict[str, Any] = {
                "layer": layer.index, "head": head, "level": 0, "row": 0, "column": 0,
                "reduce": "max",
            }  # fmt: skip
            results[key_of("tile", tile)] = _with_bytes(session.answer("tile", tile))
    return results


def _is_small(layer: HeadLayer) -> bool:
    """Whether the map of a head is one tile."""
    return layer.replay is not None and max(layer.q_len, layer.kv_len) <= TILE


def _rounded(head: dict[str, Any]) -> dict[str, Any]:
    """The answer to `head` with fewer digits: its numbers are float32, written as float64."""
    shorter = np.vectorize(lambda x: float(f"{x:.{_DIGITS}g}"), otypes=[float])
    rounded = {
        name: shorter(np.array(numbers_of_json(head[name]), float))
        for name in ("entropy", "top_weights")
    }
    return {**head, **json_data(rounded)}


def _with_bytes(answer: Answer) -> dict[str, Any]:
    """A result whose arrays are in it, as base64."""
    buffers = [
        {**about, "base64": base64.b64encode(array.tobytes()).decode("ascii")}
        for about, array in zip(answer.buffers(), answer.arrays, strict=True)
    ]
    return {**answer.result, "buffers": buffers}
