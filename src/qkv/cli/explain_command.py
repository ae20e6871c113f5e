"""`qkv explain`: the trace of attention, as text or as JSON."""

from __future__ import annotations

import argparse

import qkv
from qkv.cli.inputs import CommandInput, InputArrays, checked_index
from qkv.cli.terminal import Page

__all__ = ["run"]


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    given = _given(options.file)
    problem = CommandInput.of(given, options)
    trace = qkv.explain(
        given.query,
        given.key,
        given.value,
        *problem.variants,
        q_index=None
        if options.query is None
        else checked_index(options.query, problem.q_len, "query"),
        head=checked_index(options.head, len(problem.query), "head"),
        batch=problem.batch,
        tokens=problem.q_tokens,
        kv_tokens=given.tokens,
        grad=options.grad,
        **problem.keywords,
    )
    return trace.to_json() + "\n" if options.json else trace.text(Page().width) + "\n"


def _given(path: str | None) -> InputArrays:
    if path is not None:
        return InputArrays.from_file(path)
    from qkv.samples import shared_example

    example = shared_example()
    return InputArrays(example.q, example.k, example.v, example.tokens, "the shared example", "qkv")
