"""The text of some heads: a table, and where the notable ones look."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from qkv.inspection.rendering.counts import counted
from qkv.inspection.summaries.head_statistics import (
    FAR,
    Head,
    HeadStatistics,
    Pair,
    ShownHeads,
    most_distant_head,
    notable_heads,
)
from qkv.inspection.summaries.terminal import Page, weight
from qkv.variants import Causal
from qkv.variants.base import short_repr

__all__ = ["CAUTION", "PAIRS", "heading", "name_of", "number", "side_by_side", "summary_of_heads"]

PAIRS = 3
"""Pairs of each head that are shown."""
_WORDS = {"first": "first", "previous": "previous", "own": "query's own", "next": "next"}
CAUTION = "Attention is not explanation: weights show where a head reads, not why."


def summary_of_heads(
    shown: ShownHeads,
    statistics: HeadStatistics,
    all_heads: list[Head],
    as_fits: bool = True,
    again: str = "",
) -> str:
    """A table of the heads, what there is to say of them, and a command to try next, if any.

    With `as_fits` it has as many pairs as fit beside each other, else all.
    """
    page = Page()
    reasons = list(statistics.reasons)
    table: list[RenderableType] = []
    if not all(math.isnan(head.entropy) for head in all_heads):
        table = [*_tables_of_heads(page, shown, all_heads, as_fits), Text()]
        table += [Text(_legend(page, shown), style="dim"), Text()]
        if np.isnan(statistics.entropy).any():
            reasons.append("Means are those of the other rows.")
    elif not reasons:
        reasons.append("No query sees a key: masks or scores of -inf forbid all pairs.")
    return page.render(
        *heading(page, shown),
        Text(),
        *table,
        *(Text(reason, style="bold") for reason in reasons),
        *_sentences(page, shown, all_heads),
        *([Text(again, no_wrap=True)] if again else []),
        Text(CAUTION, style="dim"),
    )


def heading(page: Page, shown: ShownHeads) -> list[Text]:
    """The title, and what there is to know of the text."""
    notes = [Text(page.token(note, 500), style="bold") for note in shown.notes]
    return [Text(_title(page, shown)), *notes]


def _title(page: Page, shown: ShownHeads) -> str:
    kv_len = shown.kv_len
    length = f"{shown.q_len} x {kv_len} rows"
    if shown.q_len == kv_len:
        length = counted(kv_len, "token")
    parts = [page.token(shown.title, 200), length, f"head_dim {shown.head_dim}"]
    parts += [
        "causal" if isinstance(variant, Causal) else page.token(short_repr(variant), 80)
        for variant in shown.variants
    ]
    if shown.batch_size > 1:
        parts.append(f"batch {shown.batch} of 0..{shown.batch_size - 1}")
    return ", ".join(parts)


def _masses(shown: ShownHeads) -> list[str]:
    return [name for name in _WORDS if not (shown.causal and name == "next")]


def _tables_of_heads(
    page: Page, shown: ShownHeads, all_heads: list[Head], as_fits: bool
) -> Iterator[RenderableType]:
    """The numbers of each head, with its pairs beside them, or below where those do not fit."""
    numbers = ["head", "entropy", *_masses(shown)]
    pairs = [[_pair(page, shown, pair) for pair in h.pairs_beyond_first] for h in all_heads]
    room = page.width - sum(max(len(name), len("0.00")) + 2 for name in numbers)
    widest = max((cell_len(text) for texts in pairs for text in texts[:1]), default=0)
    beside = max(widest, len("strongest")) <= room
    cells = side_by_side(pairs, room if beside else page.width - len("head  "), as_fits)
    names, title = [f">{name}" for name in numbers], "strongest pairs beyond key 0"
    table = page.table(*names, title) if beside else page.table(*names, gap=1)
    for head, cell in zip(all_heads, cells, strict=True):
        shares = [weight(head.mass[name]) for name in _masses(shown)]
        texts = [Text(cell)] if beside else []
        table.add_row(str(head.index), number(head.entropy), *shares, *texts)
    yield table
    if not beside:
        below = page.table(">head", title)
        for head, cell in zip(all_heads, cells, strict=True):
            below.add_row(str(head.index), Text(cell))
        yield from (Text(), below)


def _legend(page: Page, shown: ShownHeads) -> str:
    """What the columns of the table are."""
    near = (
        "previous, own: on the key before the query's position, and at it"
        if shown.causal
        else "previous, own, next: on the key before the query's position, at it, and after it"
    )
    return (
        "entropy: of the weights, in nats; 0 where one key has all. first: the share of weight on "
        f"key 0. {near}. All are means over the queries. A pair: the query's token and row "
        f"{page.arrow} the key's, and the weight."
    )


def _sentences(page: Page, shown: ShownHeads, all_heads: list[Head]) -> list[Text]:
    """A summary of the notable heads."""
    seen = [
        f"Head {head.index} gives {head.mass[name]:.0%} of its weight to the {_WORDS[name]} token."
        for name, head in notable_heads(all_heads)
    ]
    far = most_distant_head(all_heads)
    if far:
        listed = ", ".join(_pair(page, shown, pair) for pair in far.far_pairs)
        seen.append(f"Head {far.index} looks {FAR} or more tokens away: {listed}.")
    return [Text(sentence) for sentence in seen]


def _pair(page: Page, shown: ShownHeads, pair: Pair) -> str:
    query = name_of(page, pair.q_index, shown.q_token(pair.q_index))
    key = name_of(page, pair.kv_index, shown.token_at(pair.kv_index))
    return f"{query} {page.arrow} {key} {pair.weight:.2f}"


def number(value: float) -> str:
    """Two digits; a dash for what is not a number."""
    return f"{value:.2f}" if math.isfinite(value) else "-"


def name_of(page: Page, index: int, token: str | None) -> str:
    return f"{page.token(token)} {index}".lstrip()


def side_by_side(rows: list[list[str]], room: int, as_fits: bool) -> list[str]:
    """The texts of each row in aligned columns, as many as there is room for, the rest below.

    With `as_fits` there is no below.
    """
    gap = "   "
    most = min(max(map(len, rows), default=1), (room + len(gap)) // (1 + len(gap)))
    for count in range(max(most, 1), 0, -1):
        folded = [[row[i : i + count] for i in range(0, len(row), count)] for row in rows]
        if as_fits:
            folded = [lines[:1] for lines in folded]
        widths = [0] * count
        for line in (line for lines in folded for line in lines):
            for i, text in enumerate(line):
                widths[i] = max(widths[i], cell_len(text))
        if sum(widths) + len(gap) * (count - 1) <= room:
            break
    return [
        "\n".join(
            gap.join(
                text + " " * (width - cell_len(text))
                for text, width in zip(line, widths, strict=False)
            )
            for line in lines
        )
        for lines in folded
    ]
