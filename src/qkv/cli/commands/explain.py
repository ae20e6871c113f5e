"""`qkv explain`: the trace of attention, as text or as JSON."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import qkv
from qkv.cli.commands.inspect import require_top
from qkv.cli.inputs.arrays import CommandInput, InputArrays, checked_index
from qkv.errors import ArgumentError, UnsupportedError
from qkv.files.contents import shown
from qkv.inspection.heads.head_scores import KINDS, MEANINGS, THRESHOLD
from qkv.inspection.rendering.counts import counted
from qkv.inspection.summaries.model import beside_threshold
from qkv.inspection.summaries.terminal import Page
from qkv.inspection.traces.trace import keys_to_read

__all__ = ["run"]

_EXAMPLE = "the shared example"
_MOST_ROWS = 16
"""Rows that are printed at once."""
_RANKS = {"sink": 0, "own": 1}
"""The rank of kinds of heads that say little about a text; other kinds have rank 2."""
_ENOUGH_QUERIES = 3
"""A mean over fewer is mostly chance: any head can give its weight to one key once."""


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    require_top(options)
    if options.top is not None and options.json:
        raise ArgumentError(
            f"--top {options.top} shortens the text, and --json has every key.",
            action="Leave one of them out.",
        )
    given = _of_model(options) if options.model is not None else _of_file(options)
    problem = CommandInput.of(given, options)
    if options.query is None and not options.json and problem.q_len > _MOST_ROWS:
        raise ArgumentError(
            f"{problem.q_len} rows, step by step, are too long to read (at most {_MOST_ROWS}).",
            action=f"Choose one with --query, 0 to {problem.q_len - 1}, or take all with --json.",
        )
    try:
        trace = qkv.explain(
            given.query,
            given.key,
            given.value,
            *problem.variants,
            q_index=None
            if options.query is None
            else checked_index(options.query, problem.q_len, "query"),
            head=checked_index(options.head or 0, len(problem.query), "head"),
            batch=problem.batch,
            tokens=problem.q_tokens,
            kv_tokens=given.tokens,
            grad=options.grad,
            **problem.keywords,
        )
    except UnsupportedError as error:
        action = "Leave out --grad, or use" if options.grad else "Use"
        if options.query is None:
            action = "Choose a row with --query, or use"
        raise UnsupportedError(
            error.fact, error.seen, f"{action} qkv inspect, which has no limit."
        ) from error
    if options.json:
        return trace.to_json() + "\n"
    top = options.top or keys_to_read(trace.problem.kv_len)
    page, lines = Page(), [] if given.title == _EXAMPLE else [given.title, *given.notes]
    title = "".join(f"{page.token(line, 500)}\n" for line in lines)
    return title + trace.text(page.width, top) + "\n"


def _of_model(options: argparse.Namespace) -> InputArrays:
    from qkv.cli.commands.inspect_model import refuse_with_model
    from qkv.cli.inputs.model_layer import model_layer
    from qkv.samples.shipped_models import SHIPPED_MODELS

    refuse_with_model(options)
    if options.model in SHIPPED_MODELS and options.layer is None and options.head is None:
        kind = _choose_head(options)
        given = model_layer(options)
        return replace(given, title=f"{given.title}: head {options.head}, {kind}")
    if options.layer is None:
        options.layer = 0
    return model_layer(options)


def _choose_head(options: argparse.Namespace) -> str:
    """Choose the head of a shipped model that is most clearly of one kind on this text; its kind.

    Heads that read another token come first, of them those that do so for several queries, and
    heads that rest on the first token last. Other models would have to be loaded twice.
    """
    from qkv.cli.inputs.model import inspect_model

    record = inspect_model(options, lambda done, of: None)
    entries = [(row[kind], kind, row) for kind in KINDS if (row := record.best(kind)) is not None]

    def queries(kind: str, row: dict[str, Any]) -> int:
        return int(record[row["layer"]].scores.counted[kind].sum())

    def order(entry: tuple[float, str, dict[str, Any]]) -> tuple[bool, int, bool, float]:
        weight, kind, row = entry
        enough = queries(kind, row) >= _ENOUGH_QUERIES
        return weight >= THRESHOLD, _RANKS.get(kind, 2), enough, weight

    weight, kind, row = max(entries, key=order)
    options.layer, options.head = row["layer"], row["head"]
    of = counted(queries(kind, row), "query", "queries")
    return f"which puts {beside_threshold(weight)} of its weight on {MEANINGS[kind]} (mean of {of})"


def _of_file(options: argparse.Namespace) -> InputArrays:
    from qkv.cli.commands.inspect_model import refuse_without_model
    from qkv.inspection.models.model_file import is_model_record

    if options.file is not None and is_model_record(options.file):
        layer = 0 if options.layer is None else options.layer
        raise ArgumentError(
            f"{shown(options.file)} is a record of a model, which holds no value rows.",
            action=f"Use qkv inspect FILE --layer {layer} for its weights, or "
            f"qkv explain --model NAME --layer {layer} for every number.",
        )
    refuse_without_model(options)
    return _given(options.file)


def _given(path: str | None) -> InputArrays:
    if path is not None:
        return InputArrays.from_file(path)
    from qkv.samples import shared_example

    example = shared_example()
    return InputArrays(example.q, example.k, example.v, example.tokens, _EXAMPLE, "qkv")
