"""`qkv bench`: this machine's attention, side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.text import Text

from qkv.backends.cpu.host import thread_limit
from qkv.bench import record, report
from qkv.bench.session import Settings, bench
from qkv.bench.workloads import choose
from qkv.cli.terminal import Page
from qkv.errors import ArgumentError

__all__ = ["run"]


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    if options.list:
        return _list(options)
    done = record.load(options.load) if options.load else _run(options)
    if options.save:
        record.save(done, options.save)
    if options.json:
        return record.to_json(done)
    return report.markdown(done) if options.markdown else _shown(done, options.details)


def _run(options: argparse.Namespace) -> record.Run:
    rounds = options.rounds if options.rounds is not None else (3 if options.quick else 7)
    threads = options.threads if options.threads is not None else thread_limit()
    for name, value in (("--rounds", rounds), ("--threads", threads)):
        if value < 1:
            raise ArgumentError(f"{name}={value} is below 1.", action="Pass 1 or more.")
    for file in filter(None, [options.save]):
        if not Path(file).absolute().parent.is_dir():
            raise ArgumentError(f"{file} is in no folder.", action="Make the folder first.")
    settings = Settings(threads, rounds, seconds=0.05 if options.quick else 0.15)
    return bench(choose(options.workloads, quick=options.quick), settings, _tell)


def _tell(text: str) -> None:
    print(f"qkv bench: {text}", file=sys.stderr, flush=True)


def _list(options: argparse.Namespace) -> str:
    page = Page()
    table = page.table("workload", "what", "contenders")
    for workload in choose(options.workloads, quick=options.quick):
        table.add_row(workload.name, workload.summary, ", ".join(workload.contenders))
    return page.render(table)


def _shown(done: record.Run, every: bool) -> str:
    page = Page()
    parts: list[object] = [Text(line) for line in report.headline(done)]
    if every:
        for result in done.results:
            table = page.table(*report.DETAIL_COLUMNS)
            for row in report.details(result):
                table.add_row(*(Text(page.token(cell, 200)) for cell in row))
            parts += [Text(f"\n{result.workload}: {result.summary}", style="bold"), table]
    else:
        table = page.table(*report.COLUMNS)
        for row in report.rows(done):
            table.add_row(*(Text(page.token(cell, 200)) for cell in row))
        parts += [Text(), table]
    reasons = report.notes(done)
    if reasons:
        parts.append(Text("\nNot timed:"))
        parts += [Text(f"  {page.token(reason, 400)}") for reason in reasons]
    return page.render(*parts)  # type: ignore[arg-type]
