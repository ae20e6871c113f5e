"""`qkv inspect`: where each head looks, as a table or as JSON."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import qkv
from qkv.cli.commands.inspect_json import finite, head_data, json_of_heads, pair_data
from qkv.cli.commands.lab import require_place, write_page
from qkv.cli.inputs.arrays import CommandInput, InputArrays
from qkv.cli.variants import command_line_of
from qkv.errors import ArgumentError
from qkv.inspection.rendering.progress_bar import Bar
from qkv.inspection.summaries.head_statistics import (
    Head,
    HeadStatistics,
    Pair,
    heads,
    most_distant_head,
    strongest,
)
from qkv.inspection.summaries.heads_text import (
    PAIRS,
    heading,
    name_of,
    number,
    side_by_side,
    summary_of_heads,
)
from qkv.inspection.summaries.terminal import Page

__all__ = ["require_top", "run", "run_layer"]

_KEYS = 8
_CONTEXT = 6
_LONGEST_COMMAND = 1000


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    require_top(options)
    if options.html:
        require_place(options.html)
    problem = CommandInput.of(_given(options.file), options)
    printed, view, record = _printed(problem, options)
    if options.html:
        if options.head is not None or options.query is not None:
            record = problem.inspected()
        _write_page(problem, record, options.html, view)
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


def _printed(
    problem: CommandInput, options: argparse.Namespace
) -> tuple[str, dict[str, int], qkv.Record]:
    """The text or JSON, the view with which a page opens, and the record of what was chosen.

    The view is that of the chosen head and query, or of a notable pair.
    """
    if options.head is not None:
        problem = problem.with_head(options.head)
    if options.query is not None:
        problem = problem.with_query(options.query)
        record = problem.inspected()
        view = {"head": problem.head, "query": problem.q_index}
        return _one_query(problem, problem.head_statistics(record), options), view, record
    top = options.top or PAIRS
    with Bar("reading the weights", passes=2) as bar:
        record = problem.inspected(bar)
        statistics = problem.head_statistics(record)
        all_heads = heads(problem.shown, statistics, top)
    view = _next(problem, all_heads)
    if options.json:
        heads_data = [head_data(problem, each) for each in all_heads]
        return json_of_heads(problem, statistics, heads_data), view, record
    again = ""
    if not all(math.isnan(head.entropy) for head in all_heads):
        closer = f"--query {view['query']} --head {view['head']}"
        command = f"Next: {_command(options)} {closer}"
        # A shortened command would be a different one.
        again = command if len(command) <= _LONGEST_COMMAND else ""
    text = summary_of_heads(problem.shown, statistics, all_heads, options.top is None, again)
    return text, view, record


def _given(path: str | None) -> InputArrays:
    if path is not None:
        return InputArrays.from_file(path)
    from qkv.samples import real_sample

    sample = real_sample()
    title = f"{sample.title} ({sample.licence})"
    return InputArrays(sample.q, sample.k, sample.v, sample.tokens, title, sample.source)


def _write_page(problem: CommandInput, record: qkv.Record, path: str, view: dict[str, int]) -> None:
    """All heads as a page, opened at a head and a query."""
    from qkv.lab.session import Session
    from qkv.lab.sources.heads import heads_of_record
    from qkv.lab.sources.source import Source

    if problem.batch and not problem.uniform:
        raise ArgumentError(
            f"--html shows batch row 0 of variants that differ between rows, not {problem.batch}.",
            action="Write a file with that row alone.",
        )
    given = problem.given
    about = ""
    if given.found is None and given.source != given.title:
        about = f"From {given.source}."
    heads = heads_of_record(record, given.title, given.tokens, about)
    write_page(path, Session(Source(given.title, heads=heads)), view)


def _command(options: argparse.Namespace) -> str:
    """This command line without the options that choose heads and queries."""
    words = ["qkv", "inspect"]
    words += [options.file] if options.file else []
    words += command_line_of(options.variants)
    words += ["--layout", options.layout] if options.layout != "bhld" else []
    for name in ("model", "layer", "text", "tokens", "q_offset", "scale", "batch"):
        value = getattr(options, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """A word quoted for a shell; control characters as escapes that bash reads."""
    encoding = Page().console.encoding
    if word.isprintable() and word.encode(encoding, "ignore").decode(encoding) == word:
        return shlex.quote(word)
    return "$'" + "".join(_escaped(c, encoding) for c in word) + "'"


def _escaped(character: str, encoding: str) -> str:
    if character in "\\'":
        return "\\" + character
    if character.isprintable() and character.encode(encoding, "ignore"):
        return character
    # Bytes, since bash reads \\u in a locale of Unicode alone. Words that are not text
    # come as surrogates.
    errors = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", errors))


# --- all query rows ------------------------------------------------------------------------------


def _next(problem: CommandInput, all_heads: list[Head]) -> dict[str, int]:
    """A head and a query to look at next, and the key that this reads, as a page names them."""
    far = most_distant_head(all_heads)
    if far is None:
        return {"head": all_heads[0].index, "query": problem.q_index}
    pair = far.far_pairs[0]
    return {"head": far.index, "query": pair.q_index, "kkey": pair.kv_index}


# --- one query row -------------------------------------------------------------------------------


def _one_query(problem: CommandInput, record: HeadStatistics, options: argparse.Namespace) -> str:
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
    parts: list[RenderableType] = [
        *heading(page, problem.shown),
        _context(page, problem),
        Text(),
    ]
    parts += [Text(reason, style="bold") for reason in record.reasons]
    if not any(tops):
        # Without keys the table would be empty.
        parts += [] if record.reasons else [Text("A mask hides every key from this query.")]
    elif options.head is None:
        parts.append(_keys_of_heads(page, problem, entropies, tops, options.top is None))
    else:
        parts.append(_keys_of_head(page, problem, tops[0]))
    return page.render(*parts)


def _context(page: Page, problem: CommandInput) -> Text:
    """The query's token among those around it."""
    given, own = problem.given, problem.q_index
    known = given.tokens if given.q_tokens is None else given.q_tokens
    line = Text(f"query {own}" + (":" if known else ""))
    for row in range(own - _CONTEXT, own + _CONTEXT + 1):
        token = problem.shown.q_token(row)
        if token is not None:
            shown = page.token(token)
            line.append(f" [{shown}]" if row == own else f" {shown}")
    return line


def _keys_of_head(page: Page, problem: CommandInput, top: Sequence[Pair]) -> Table:
    table = page.table(">key", "token", ">weight", f"in head {problem.head}")
    for pair in top:
        token = Text(page.token(problem.shown.token_at(pair.kv_index)))
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
        [f"{name_of(page, pair.kv_index, problem.shown.token_at(pair.kv_index))} {pair.weight:.2f}"
         for pair in top]
        for top in tops
    ]  # fmt: skip
    cells = side_by_side(keys, page.width - len("head  entropy  "), as_fits)
    for h, (entropy, cell) in enumerate(zip(entropies, cells, strict=True)):
        table.add_row(str(problem.head + h), number(entropy), Text(cell))
    return table
