"""What the options ask for: run, load, save, and show as text, JSON, Markdown or a picture."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from benchmarks.contenders import contenders_of
from benchmarks.latency import session as latency
from benchmarks.models import session as models
from benchmarks.models.rows import choose as choose_models
from benchmarks.problems.workloads import choose
from benchmarks.results import compare, record, report
from benchmarks.results.picture import svg
from benchmarks.running.revision import beside, checked_out
from benchmarks.running.session import LineUp, Settings, bench
from qkv.errors import ArgumentError, UnsupportedError
from qkv.inspection.summaries.terminal import Page
from qkv.process.threads import get_num_threads

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["run"]

_ROUNDS, _QUICK_ROUNDS = 7, 3
_SECONDS, _QUICK_SECONDS = 0.15, 0.05
_BETWEEN = 2
"""Blanks between two columns."""


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    if options.list:
        return _list(options)
    if options.compare and len(options.compare) == 2:
        return _compared(*options.compare)
    if options.compare and len(options.compare) > 2:
        raise ArgumentError(
            f"--compare was given {len(options.compare)} names.",
            action="Pass two saved runs, or one revision.",
        )
    done = record.load(options.load) if options.load else _run(options)
    if options.save and options.load:
        record.save(done, options.save)
    if options.picture:
        Path(options.picture).write_text(svg(done), encoding="utf-8")
    if options.markdown:
        _write_page(Path(options.markdown), done)
    return record.to_json(done) if options.json else _shown(done, options.details)


def _run(options: argparse.Namespace) -> record.Run:
    quick = options.quick
    rounds = options.rounds if options.rounds is not None else _QUICK_ROUNDS if quick else _ROUNDS
    threads = options.threads if options.threads is not None else _threads()
    for name, value in (("--rounds", rounds), ("--threads", threads)):
        if value < 1:
            raise ArgumentError(f"{name}={value} is below 1.", action="Pass 1 or more.")
    for file in filter(None, (options.save, options.picture, options.markdown)):
        # Checked before minutes of work.
        if not Path(file).absolute().parent.is_dir():
            raise ArgumentError(f"{file} is in no folder.", action="Make the folder first.")
    if options.latency:
        return _latency(options, threads)
    if options.models:
        return _models(options, threads)
    chosen = choose(options.workloads, quick=quick)
    settings = Settings(threads, rounds, _QUICK_SECONDS if quick else _SECONDS)
    ordinary: LineUp = partial(contenders_of, packages=options.only or ())
    revision = beside(*options.compare) if options.compare else nullcontext(ordinary)

    with revision as line_up:
        return bench(chosen, settings, line_up, _tell, partial(_keep, options))


def _latency(options: argparse.Namespace, threads: int) -> record.Run:
    rounds = {} if options.rounds is None else {"rounds": options.rounds}
    settings = latency.Settings(threads, **rounds)
    chosen, keep = latency.choose(options.workloads), partial(_keep, options)
    revision = checked_out(*options.compare) if options.compare else nullcontext(None)
    with revision as there:
        return latency.measure(chosen, settings, options.only or (), _tell, keep, there)


def _models(options: argparse.Namespace, threads: int) -> record.Run:
    rounds = {} if options.rounds is None else {"rounds": options.rounds}
    settings = models.Settings(threads, **rounds)
    return models.measure(
        choose_models(options.workloads), settings, _tell, partial(_keep, options)
    )


def _keep(options: argparse.Namespace, done: record.Run) -> None:
    if options.save:
        record.save(done, options.save)


def _write_page(page: Path, done: record.Run) -> None:
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    page.write_text(report.page(text, done), encoding="utf-8")


def _threads() -> int:
    try:
        from qkv.backends.cpu.machine.host import host

        host()
    except ImportError as error:
        raise UnsupportedError(
            f"qkv's compiled backend cannot be loaded: {error}.",
            action="Install llvmlite; without it there is nothing to measure.",
        ) from error
    return get_num_threads()


def _tell(text: str) -> None:
    print(f"benchmarks: {text}", file=sys.stderr, flush=True)


def _list(options: argparse.Namespace) -> str:
    page = Page()
    table = page.table("workload", "what", "contenders")
    for workload in choose(options.workloads, quick=options.quick):
        table.add_row(workload.name, workload.summary, ", ".join(workload.contenders))
    return page.render(table)


def _compared(before: str, after: str) -> str:
    page, old, new = Page(), record.load(before), record.load(after)
    lines = [Text(f"{name}: {line}") for name, r in ((before, old), (after, new))
             for line in report.headline(r)]  # fmt: skip
    return page.render(*lines, Text(), _table(page, compare.COLUMNS, compare.rows(old, new)))


def _shown(done: record.Run, every: bool) -> str:
    page = Page()
    parts: list[RenderableType] = [Text(line) for line in report.headline(done)]
    if every:
        for result in done.results:
            name = Text(f"\n{result.workload}: {result.summary}", style="bold")
            parts += [name, _table(page, report.DETAIL_COLUMNS, report.details(result))]
    else:
        for table in report.tables(done):
            parts += [Text(f"\n{table.title}"), _table(page, table.columns, table.rows)]
    reasons = report.notes(done)
    if reasons:
        parts += [Text("\nNot timed:"), *(Text(f"  {page.token(r, 400)}") for r in reasons)]
    return page.render(*parts)


def _table(page: Page, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """A table; where the page is too narrow for it, heads of numbers have a line for each word."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    if sum(widths) + _BETWEEN * len(widths) > page.width:
        columns = tuple(c.replace(" ", "\n") if c.startswith(">") else c for c in columns)
    table = page.table(*columns)
    for row in rows:
        table.add_row(*(Text(page.token(cell, 400)) for cell in row))
    return table
