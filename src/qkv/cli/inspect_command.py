"""`qkv inspect`: where each head looks, as a table or as JSON."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import qkv
from qkv.cli.head_statistics import (
    FAR,
    Head,
    Pair,
    heads,
    most_distant_head,
    notable_heads,
    strongest,
)
from qkv.cli.inputs import CommandInput, HeadStatistics, InputArrays
from qkv.cli.inspect_json import finite, head_data, json_of_heads, pair_data
from qkv.cli.lab_command import require_place, write_page
from qkv.cli.terminal import Bar, Page, weight
from qkv.cli.variants import command_line_of
from qkv.errors import ArgumentError
from qkv.files import Arrays

__all__ = ["run", "summary_of_heads"]

_PAIRS = 3
_KEYS = 8
_CONTEXT = 6
_WORDS = {"first": "first", "previous": "previous", "own": "query's own", "next": "next"}
_CAUTION = "Attention is not explanation: weights show where a head reads, not why."


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    require_top(options)
    if options.html:
        require_place(options.html)
    problem = CommandInput.of(_given(options.file), options)
    printed, view = _printed(problem, options)
    if options.html:
        _write_page(problem, options.html, view)
        if not options.json:
            printed += f"Written: {Page().token(options.html, 300)}\n"
    return printed


def run_layer(options: argparse.Namespace, given: InputArrays) -> str:
    """The output of the command for one layer of a model."""
    return _printed(CommandInput.of(given, options), options)[0]


def require_top(options: argparse.Namespace) -> None:
    """Complain of a number of keys or pairs that shows none."""
    if options.top is not None and options.top < 1:
        raise ArgumentError(f"--top {options.top} shows nothing.", action="Pass 1 or more.")


def _printed(problem: CommandInput, options: argparse.Namespace) -> tuple[str, dict[str, int]]:
    """The text or JSON, and where a page opens: at what was asked for, or at a notable pair."""
    if options.head is not None:
        problem = problem.with_head(options.head)
    if options.query is not None:
        problem = problem.with_query(options.query)
        return _one_query(problem, options), {"head": problem.head, "query": problem.q_index}
    top = options.top or _PAIRS
    with Bar("reading the weights", passes=2) as bar:
        statistics = problem.head_statistics(bar)
        found = heads(problem, statistics, top)
    view = _next(problem, found)
    if options.json:
        heads_data = [head_data(problem, each) for each in found]
        return json_of_heads(problem, statistics, heads_data), view
    again = ""
    if not all(math.isnan(head.entropy) for head in found):
        closer = f"--query {view['query']} --head {view['head']}"
        again = f"Next: {Page().token(_command(options), 500)} {closer}"
    return summary_of_heads(problem, statistics, found, options.top, again), view


def summary_of_heads(
    problem: CommandInput,
    statistics: HeadStatistics,
    found: list[Head],
    top: int | None = None,
    again: str = "",
) -> str:
    """A table of the heads, what there is to say of them, and a command to try next, if any."""
    page = Page()
    reasons = list(statistics.reasons)
    table: list[RenderableType] = []
    if not all(math.isnan(head.entropy) for head in found):
        count, as_fits = top or _PAIRS, top is None
        table = [*_tables_of_heads(page, problem, found, count, as_fits), Text()]
        table += [Text(_legend(page, problem), style="dim"), Text()]
        if np.isnan(statistics.entropy).any():
            reasons.append("Means are those of the other rows.")
    return page.render(
        Text(_title(page, problem)),
        Text(),
        *table,
        *(Text(reason, style="bold") for reason in reasons),
        *_sentences(page, problem, found),
        *([Text(again, no_wrap=True)] if again else []),
        Text(_CAUTION, style="dim"),
    )


def _given(path: str | None) -> InputArrays:
    if path is not None:
        return InputArrays.from_file(path)
    from qkv.samples import real_sample

    sample = real_sample()
    title = f"{sample.title} ({sample.licence})"
    return InputArrays(sample.q, sample.k, sample.v, sample.tokens, title, sample.source)


def _write_page(problem: CommandInput, path: str, view: dict[str, int]) -> None:
    """All heads as a page, opened at a head and a query."""
    from qkv.lab.session import Session
    from qkv.lab.sources import open_arrays

    given = problem.given
    keywords: dict[str, Any] = {}
    if problem.uniform:
        arrays = problem.query, problem.key, problem.value
        if problem.scale is not None:
            keywords["scale"] = problem.scale
        if problem.q_offset:
            keywords["q_offset"] = problem.q_offset
    elif problem.batch:
        raise ArgumentError(
            f"--html shows batch row 0 of variants that differ between rows, not {problem.batch}.",
            action="Write a file with that row alone.",
        )
    else:
        arrays, keywords = (given.query, given.key, given.value), problem.keywords
    about = f"From {given.source}." if given.source != given.title else ""
    source = open_arrays(
        Arrays(*arrays, given.tokens, {}), given.title, *problem.variants, about=about, **keywords
    )
    write_page(path, Session(source), view)


def _command(options: argparse.Namespace) -> str:
    """This command line again, without what narrows it down."""
    words = ["qkv", "inspect"]
    words += [options.file] if options.file else []
    words += command_line_of(options.variants)
    words += ["--layout", options.layout] if options.layout != "bhld" else []
    for name in ("model", "layer", "text", "tokens", "q_offset", "scale", "batch"):
        value = getattr(options, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    return shlex.join(words)


def _title(page: Page, problem: CommandInput) -> str:
    kv_len = problem.key.shape[1]
    length = f"{kv_len} tokens" if problem.q_len == kv_len else f"{problem.q_len} x {kv_len} rows"
    parts = [page.token(problem.given.title, 200), length, f"head_dim {problem.query.shape[2]}"]
    parts += [
        "causal" if isinstance(variant, qkv.Causal) else page.token(repr(variant), 80)
        for variant in problem.variants
    ]
    if problem.batch_size > 1:
        parts.append(f"batch {problem.batch} of 0..{problem.batch_size - 1}")
    return ", ".join(parts)


# --- all query rows ------------------------------------------------------------------------------


def _masses(problem: CommandInput) -> list[str]:
    return [name for name in _WORDS if not (problem.causal and name == "next")]


def _tables_of_heads(
    page: Page, problem: CommandInput, found: list[Head], top: int, as_fits: bool
) -> Iterator[RenderableType]:
    """The numbers of each head, with its pairs beside them, or below where those do not fit."""
    numbers = ["head", "entropy", *_masses(problem)]
    pairs = [[_pair(page, problem, pair) for pair in h.pairs_beyond_first] for h in found]
    room = page.width - sum(max(len(name), len("0.00")) + 2 for name in numbers)
    widest = max((cell_len(text) for texts in pairs for text in texts[:1]), default=0)
    beside = max(widest, len("strongest")) <= room
    cells = _side_by_side(pairs, top, room if beside else page.width - len("head  "), as_fits)
    names, title = [f">{name}" for name in numbers], "strongest pairs beyond key 0"
    table = page.table(*names, title) if beside else page.table(*names, gap=1)
    for head, cell in zip(found, cells, strict=True):
        shares = [weight(head.mass[name]) for name in _masses(problem)]
        texts = [Text(cell)] if beside else []
        table.add_row(str(head.index), _number(head.entropy), *shares, *texts)
    yield table
    if not beside:
        below = page.table(">head", title)
        for head, cell in zip(found, cells, strict=True):
            below.add_row(str(head.index), Text(cell))
        yield from (Text(), below)


def _legend(page: Page, problem: CommandInput) -> str:
    """What the columns of the table are."""
    near = (
        "previous, own: on the key before the query's position, and at it"
        if problem.causal
        else "previous, own, next: on the key before the query's position, at it, and after it"
    )
    return (
        "entropy: of the weights, in nats; 0 where one key has all. first: the share of weight on "
        f"key 0. {near}. All are means over the queries. A pair: the query's token and row "
        f"{page.arrow} the key's, and the weight."
    )


def _sentences(page: Page, problem: CommandInput, found: list[Head]) -> list[Text]:
    """A summary of the notable heads."""
    seen = [
        f"Head {head.index} gives {head.mass[name]:.0%} of its weight to the {_WORDS[name]} token."
        for name, head in notable_heads(found)
    ]
    far = most_distant_head(found)
    if far:
        listed = ", ".join(_pair(page, problem, pair) for pair in far.far_pairs)
        seen.append(f"Head {far.index} looks {FAR} or more tokens away: {listed}.")
    return [Text(sentence) for sentence in seen]


def _next(problem: CommandInput, found: list[Head]) -> dict[str, int]:
    """A head and a query to look at next, and the key that this reads, as a page names them."""
    far = most_distant_head(found)
    if far is None:
        return {"head": found[0].index, "query": problem.q_index}
    pair = far.far_pairs[0]
    return {"head": far.index, "query": pair.q_index, "kkey": pair.kv_index}


# --- one query row -------------------------------------------------------------------------------


def _one_query(problem: CommandInput, options: argparse.Namespace) -> str:
    record = problem.head_statistics()
    count = min(options.top or _KEYS, problem.key.shape[1])
    indices, weights = record.top(count)
    entropies = [float(row[0]) for row in record.entropy]
    tops = [
        strongest(rows, values, count, problem.q_index)
        for rows, values in zip(indices, weights, strict=True)
    ]
    if options.json:
        return json_of_heads(
            problem,
            record,
            [
                {
                    "head": problem.head + h,
                    "entropy": finite(entropies[h]),
                    "pairs": pair_data(problem, top),
                }
                for h, top in enumerate(tops)
            ],
        )
    page = Page()
    parts: list[RenderableType] = [Text(_title(page, problem)), _context(page, problem), Text()]
    parts += [Text(reason, style="bold") for reason in record.reasons]
    if not any(tops):
        # An empty table would say less.
        parts += [] if record.reasons else [Text("A mask hides every key from this query.")]
    elif options.head is None:
        parts.append(_keys_of_heads(page, problem, entropies, tops, options.top is None))
    else:
        parts.append(_keys_of_head(page, problem, tops[0]))
    return page.render(*parts)


def _context(page: Page, problem: CommandInput) -> Text:
    """The query's token among those around it."""
    line = Text(f"query {problem.q_index}" + (":" if problem.given.tokens else ""))
    own = problem.q_offset
    for position in range(own - _CONTEXT, own + _CONTEXT + 1):
        token = problem.token_at(position)
        if token is not None:
            shown = page.token(token)
            line.append(f" [{shown}]" if position == own else f" {shown}")
    return line


def _keys_of_head(page: Page, problem: CommandInput, top: Sequence[Pair]) -> Table:
    table = page.table(">key", "token", ">weight", f"in head {problem.head}")
    for pair in top:
        token = Text(page.token(problem.token_at(pair.kv_index)))
        bar = page.full * int(40 * pair.weight)
        table.add_row(str(pair.kv_index), token, f"{pair.weight:.4f}", Text(bar))
    return table


def _keys_of_heads(
    page: Page,
    problem: CommandInput,
    entropies: list[float],
    tops: list[tuple[Pair, ...]],
    as_fits: bool,
) -> Table:
    table = page.table(">head", ">entropy", "keys with most weight")
    keys = [
        [f"{_name(page, pair.kv_index, problem.token_at(pair.kv_index))} {pair.weight:.2f}"
         for pair in top]
        for top in tops
    ]  # fmt: skip
    cells = _side_by_side(keys, max(map(len, keys)), page.width - len("head  entropy  "), as_fits)
    for h, (entropy, cell) in enumerate(zip(entropies, cells, strict=True)):
        table.add_row(str(problem.head + h), _number(entropy), Text(cell))
    return table


# --- parts of both -------------------------------------------------------------------------------


def _pair(page: Page, problem: CommandInput, pair: Pair) -> str:
    query = _name(page, pair.q_index, problem.q_token(pair.q_index))
    key = _name(page, pair.kv_index, problem.token_at(pair.kv_index))
    return f"{query} {page.arrow} {key} {pair.weight:.2f}"


def _number(value: float) -> str:
    """Two digits; a dash for what is no number."""
    return f"{value:.2f}" if math.isfinite(value) else "-"


def _name(page: Page, index: int, token: str | None) -> str:
    return f"{page.token(token)} {index}".lstrip()


def _side_by_side(rows: list[list[str]], top: int, room: int, as_fits: bool) -> list[str]:
    """The texts of each row in aligned columns, as many as there is room for, the rest below.

    With `as_fits` there is no below.
    """
    gap = "   "
    for count in range(max(top, 1), 0, -1):
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
