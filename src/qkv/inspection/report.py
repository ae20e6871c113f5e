"""A model record as one HTML page that needs nothing else.

No request leaves it: style and script are inside, and a content security policy allows these two,
named by their hashes, and nothing more. What tokens and names say is text, never markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from qkv.inspection.head_scores import KINDS, SCORES, THRESHOLD
from qkv.inspection.model_record import ModelRecord
from qkv.inspection.tokens import printable

__all__ = ["LETTERS", "MEANINGS", "html"]

LETTERS = {"induction": "I", "duplicate": "D", "previous": "P", "own": "O", "sink": "S"}
MEANINGS = {
    "induction": "what followed this token before",
    "duplicate": "the same token, earlier",
    "previous": "the token before",
    "own": "the token itself",
    "sink": "the first token, or a sink",
}

LONGEST_TEXT = 4000
"""Tokens of a text that the page shows."""

_CAUTION = "Attention is not explanation: weights show where a head reads, not why."
_LONGEST_TOKEN = 40
_PAIRS = 5
_WORTH_SAYING = 0.2
_COLUMNS = ("layer", "head", "kind", *SCORES)


def html(record: ModelRecord) -> str:
    """The page: a map, every head's numbers, and the text with where its strongest heads look.

    Parameters
    ----------
    record : ModelRecord

    Returns
    -------
    str
        A document of some 15 kB, 0.3 kB for each head and 0.4 kB for each token.
    """
    style, script = (_asset(name) for name in ("report.css", "report.js"))
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_hash(style)}'",
            f"script-src '{_hash(script)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    name = _plain(record.model, 200)
    parts = (
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{name}: heads</title>",
        f"<style>{style}</style>",
        "<main>",
        f"<h1>{name}</h1>",
        f"<p>{_facts(record)}</p>",
        f"<p class=faint>{_CAUTION}</p>",
        *_map(record),
        *_legend(record),
        *_text(record),
        *_table(record),
        "</main>",
        f'<script type="application/json" id="data">{_data(record)}</script>',
        f"<script>{script}</script>",
        "</html>",
    )
    return "\n".join(parts) + "\n"


def _asset(name: str) -> str:
    return resources.files("qkv.inspection").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")


def _plain(text: str, longest: int = _LONGEST_TOKEN) -> str:
    """Somebody else's text without characters that act, as HTML."""
    return escape(printable(text, longest))


def _facts(record: ModelRecord) -> str:
    heads = sum(layer.num_heads for layer in record)
    length = 0 if record.tokens is None else record.tokens.shape[-1]
    return f"{len(record)} layers, {heads} heads, {length} tokens."


def _map(record: ModelRecord) -> Iterator[str]:
    """One cell for each head; each leads to its row in the table."""
    widest = max((layer.num_heads for layer in record), default=0)
    yield "<h2>Map</h2>"
    yield "<p class=faint id=of-map>Layers down, heads across. A letter is the kind of a head.</p>"
    yield "<div class=wide><table class=map aria-describedby=of-map>"
    numbers = "".join(f"<th scope=col>{head}</th>" for head in range(widest))
    yield f"<thead><tr><td></td>{numbers}</tr></thead><tbody>"
    for layer in record:
        cells = "".join(_cell(row) for row in layer.heads())
        yield f"<tr><th scope=row>layer {layer.index}</th>{cells}</tr>"
    yield "</tbody></table></div>"


def _cell(row: dict[str, Any]) -> str:
    place = f"layer {row['layer']} head {row['head']}"
    kind = row["kind"]
    label = f"{place}: {kind} {row[kind]:.2f}" if kind else f"{place}: none of these kinds"
    marks = f' class="kind {kind}"' if kind else ""
    letter = LETTERS[kind] if kind else "·"
    target = f"h-{row['layer']}-{row['head']}"
    return f'<td{marks}><a href="#{target}" title="{label}" aria-label="{label}">{letter}</a></td>'


def _legend(record: ModelRecord) -> Iterator[str]:
    yield "<h2>Kinds</h2><div class=wide><table class=legend><thead><tr><td></td>"
    for name in ("kind", "most weight on", "strongest", "mean weight"):
        yield f"<th scope=col>{name}</th>"
    yield "</tr></thead><tbody>"
    for kind in KINDS:
        best = record.best(kind)
        where = f"layer {best['layer']} head {best['head']}" if best else "-"
        weight = f"{best[kind]:.2f}" if best else "-"
        yield (
            f'<tr><td><span class="letter kind {kind}" aria-hidden=true>{LETTERS[kind]}</span>'
            f"</td><th scope=row>{kind}</th><td>{MEANINGS[kind]}</td><td>{where}</td>"
            f"<td class=number>{weight}</td></tr>"
        )
    yield "</tbody></table></div>"
    yield (
        f"<p class=faint>A head is of a kind if it puts {THRESHOLD} or more of its weight there, "
        "averaged over the queries that have such a key.</p>"
    )


def _table(record: ModelRecord) -> Iterator[str]:
    yield "<h2>Heads</h2>"
    yield "<p class=faint id=of-heads>Means over tokens; entropy in nats, distance in tokens.</p>"
    yield "<div class=wide><table class=heads aria-describedby=of-heads>"
    names = "".join(
        f"<th scope=col><button type=button>{name.replace('_', ' ')}</button></th>"
        for name in _COLUMNS
    )
    yield f"<thead><tr>{names}</tr></thead><tbody>"
    for row in record.rows():
        cells = "".join(f"<td>{_number(row[name])}</td>" for name in _COLUMNS)
        yield f'<tr id="h-{row["layer"]}-{row["head"]}">{cells}</tr>'
    yield "</tbody></table></div>"


def _number(value: Any) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


# --- the text ------------------------------------------------------------------------------------


def _text(record: ModelRecord) -> Iterator[str]:
    """The tokens, to step through, and for each head its strongest pairs as plain text."""
    yield "<h2>Text</h2>"
    heads = _strongest(record)
    tokens = _tokens(record)
    if not tokens or not heads:
        yield "<p>No tokens are known.</p>"
    yield "<div class=needs-script><label for=head>Where does </label><select id=head>"
    yield from (f"<option>{escape(_title(row, kind))}</option>" for kind, row in heads)
    yield "</select><label for=head> look?</label>"
    yield "<p class=faint>Choose a token by a click, or with the arrow keys.</p>"
    yield '<div id=words tabindex=0 role=group aria-label="The text" aria-describedby=looks></div>'
    yield '<p id=looks aria-live="polite"></p></div>'
    length = 0 if record.tokens is None else record.tokens.shape[-1]
    if length > len(tokens) > 0:
        yield f"<p class=faint>The first {len(tokens)} of {length} tokens are shown.</p>"
    yield "<p>Strongest pairs of a query and a key, beyond the first key:</p><ul>"
    for kind, row in heads:
        pairs = ", ".join(escape(pair) for pair in _pairs(record, row, kind, tokens)) or "none"
        yield f"<li>{escape(_title(row, kind))}: {pairs}</li>"
    yield "</ul>"


def _strongest(record: ModelRecord) -> list[tuple[str, dict[str, Any]]]:
    """The heads that are most induction and most previous, and of other kinds if there are any."""
    found = ((kind, record.best(kind)) for kind in ("induction", "previous", "duplicate", "sink"))
    always = ("induction", "previous")
    return [
        (kind, row)
        for kind, row in found
        if row is not None and (kind in always or row["kind"] == kind)
    ]


def _title(row: dict[str, Any], kind: str) -> str:
    return f"layer {row['layer']} head {row['head']} ({kind} {row[kind]:.2f})"


def _tokens(record: ModelRecord) -> list[str]:
    return [printable(token, _LONGEST_TOKEN) for token in (record.texts or ())[:LONGEST_TEXT]]


def _pairs(record: ModelRecord, row: dict[str, Any], kind: str, tokens: list[str]) -> Iterable[str]:
    """The heaviest pairs of a head, of queries that its kind counts."""
    layer = record[row["layer"]]
    keys, weights = (array[0, row["head"]] for array in layer.top)
    queries = layer.scores.counted[kind][0] & (np.arange(len(keys)) < len(tokens))
    inside = queries[:, None] & (keys > 0) & (keys < len(tokens))
    heaviest = np.argsort(-np.where(inside, weights, 0), axis=None, kind="stable")
    for place in heaviest[:_PAIRS]:
        query, nth = np.unravel_index(place, keys.shape)
        if inside[query, nth] and weights[query, nth] >= _WORTH_SAYING:
            key = keys[query, nth]
            yield f"{tokens[query]} {query} → {tokens[key]} {key} ({weights[query, nth]:.2f})"


def _data(record: ModelRecord) -> str:
    """The data of the page's script, as JSON that cannot close its HTML element."""
    tokens = _tokens(record)
    heads = []
    for _, row in _strongest(record) if tokens else ():
        keys, weights = (array[0, row["head"]] for array in record[row["layer"]].top)
        heads.append(
            {
                "keys": keys[: len(tokens)].tolist(),
                "weights": np.round(weights[: len(tokens)].astype(float), 3).tolist(),
            }
        )
    text = json.dumps({"tokens": tokens, "heads": heads}, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
