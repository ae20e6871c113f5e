"""Write `docs/mechanisms`: a page for each mechanism, and an index.

Run by maintainers, after each change of a mechanism:

    python tools/mechanism_pages.py

Nothing on these pages is written by hand: texts come from the docstring of the class and from
`src/qkv/mechanisms/background.json`, numbers from a run on the shared example. A test compares the
files with what this script makes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from qkv.cost import mechanism_cost, memory
from qkv.mechanisms import MECHANISMS, Comparison, Mechanism, compare
from qkv.mechanisms.background import background

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "mechanisms"
SOURCE = ROOT / "src"

METHODS = [
    "project",
    "heads",
    "query_features",
    "key_features",
    "queries",
    "keys_and_values",
    "variants",
    "mix",
    "difference",
    "join",
    "__call__",
    "_causal",
    "step",
    "next_tokens",
]
"""What computes an output, in the order in which a call comes to it."""

LENGTHS = 5, 1_000, 100_000

ABOUT_EXAMPLE = (
    "Five tokens with given rows of Q, K and V, four numbers each. Where a mechanism projects its "
    "input, the input is the rows [Q | K | V], and the projections select their columns."
)


ABOUT_INDEX = (
    "Each has a page with what it was invented against, its formula, the calculation of the first "
    "token, weights and output on the same five tokens, its code and its cost. The pages are made "
    "from the classes by `tools/mechanism_pages.py`.\n\n"
    "Difference is the largest one from the output of full attention; operations are those of "
    "1,000 tokens with the sizes of the example."
)


def page(cls: type[Mechanism], row: Any, tokens: Sequence[str]) -> str:
    """The text of one page.

    Parameters
    ----------
    cls : subclass of Mechanism
    row : qkv.mechanisms.comparison.Row
        Weights and output of its example.
    tokens : sequence of str
    """
    about = background(cls.name)
    mechanism, arguments = cls.example(), cls.example_arguments()
    others = dict(zip(("key", "value"), arguments[1:], strict=False))

    def calculation(index: int) -> str:
        return fence("text", str(mechanism.explain(arguments[0], tokens, index, **others)))

    doc = inspect.getdoc(cls) or ""
    symbols = [(f"`{name}`", f"`{shape}`" if shape[0] == "(" else shape, meaning)
               for name, shape, meaning in about.symbols]  # fmt: skip
    parts = [
        f"# {cls.__name__} (`{cls.name}`)",
        doc.partition("\n\nParameters\n")[0],
        "## What it was invented against",
        about.invented_against,
        "## Formula",
        fence("text", cls.formula),
        "Shapes are those of one sequence and, where there are heads, of one head.",
        table(("symbol", "shape", "meaning"), symbols),
        "## The first token's calculation",
        ABOUT_EXAMPLE,
        calculation(0),
        *(("The first token sees itself alone; the third sees three tokens:", calculation(2))
          if not row.mixing[:, 0, 1:].any() else ()),
        "## Weights and output on the example",
        *weights(row, tokens),
        outputs(row, tokens),
        *code(cls),
        *cost(cls, doc),
        "## Paper",
        cls.paper + ".",
    ]  # fmt: skip
    if about.errata:
        links = (f"- [{e.name}](../errata.md#{e.name}): {e.what}" for e in about.errata)
        parts += ["## Errata that concern it", "\n".join(links)]
    parts += ["[All mechanisms](README.md)"]
    return "\n\n".join(parts) + "\n"


def weights(row: Any, tokens: Sequence[str]) -> Iterable[str]:
    """One table for each head; a row is the token whose output is made."""
    for head, mixing in enumerate(row.mixing):
        if len(row.mixing) > 1:
            yield f"Head or channel {head}:"
        lines = ((token, *map(number, line)) for token, line in zip(tokens, mixing, strict=True))
        yield table(("weight of", *tokens[: mixing.shape[1]]), lines)


def outputs(row: Any, tokens: Sequence[str]) -> str:
    """The table of outputs, and how far they are from those of full attention."""
    head = ("output of", *(f"`[{i}]`" for i in range(row.output.shape[1])))
    lines = ((token, *map(number, line)) for token, line in zip(tokens, row.output, strict=True))
    return (
        f"{table(head, lines)}\n\nLargest difference from the output of full attention, "
        f"`softmax(Q K^T / sqrt(d)) V`: {number(row.difference)}."
    )


def code(cls: type[Mechanism]) -> Iterable[str]:
    """How to run it, and the methods that compute it without their docstrings."""
    name = cls.__name__
    yield "## Code"
    yield fence(
        "python",
        f"from qkv.mechanisms import {name}\n\n"
        f"mechanism = {name}.example()\n"
        f"output = mechanism(*{name}.example_arguments())\n"
        "assert output.shape == (5, 4)",
    )
    path = Path(inspect.getfile(cls)).relative_to(SOURCE)
    yield f"All of it: [`{path.name}`](../../src/{path.as_posix()}). What computes the output:"
    found: dict[str, list[str]] = {}
    for method in METHODS:
        if method in ("heads", "variants") and hasattr(cls, "key_features"):
            continue  # They go to `qkv.attention`, which linear attention does not call.
        owner = next((c for c in cls.__mro__ if method in vars(c)), Mechanism)
        if owner is not Mechanism:
            found.setdefault(owner.__name__, []).append(without_docstring(vars(owner)[method]))
    module = inspect.getmodule(getattr(inspect.getmodule(cls), "chunk", cls))
    for function in ("recurrent", "chunk"):
        if hasattr(module, function):
            found.setdefault("functions", []).append(without_docstring(getattr(module, function)))
    parts = [f"# {owner}\n\n" + "\n\n".join(texts) for owner, texts in found.items()]
    yield fence("py", "\n\n\n".join(parts))


def without_docstring(function: Any) -> str:
    """The source of a function without its docstring."""
    source = textwrap.dedent(inspect.getsource(function))
    lines = source.rstrip().split("\n")
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    if ast.get_docstring(definition) and len(definition.body) > 1:
        text = definition.body[0]
        del lines[text.lineno - 1 : text.end_lineno]
    return "\n".join(lines)


def cost(cls: type[Mechanism], doc: str) -> Iterable[str]:
    """Operations, parameters and bytes of the example's sizes, at some lengths."""
    costs = [mechanism_cost(cls.name, n) for n in LENGTHS]
    yield "## Cost"
    notes = doc.partition("\nNotes\n-----\n")[2].partition("\n\nExamples\n")[0]
    yield notes
    yield f"With the sizes of the example and numbers of type {costs[0].dtype}:"
    lines = [
        (
            f"{c.context:,}",
            f"{int(c.ledger.total):,}",
            f"{int(c.ledger.parameters):,}",
            memory(int(c.ledger.bytes_moved)),
            memory(c.score_bytes),
        )
        for c in costs
    ]
    head = ("tokens", "operations", "parameters", "bytes moved", "bytes of all scores")
    yield table(head, lines)
    sizes = background(cls.name).sizes.items()
    yield "In closed form, with " + ", ".join(f"{name} = {size}" for name, size in sizes) + ":"
    steps = [(name, f"`{count.formula}`") for name, count in costs[0].ledger.steps.items()]
    yield table(("step", "operations"), [*steps, ("all", f"`{costs[0].ledger.total.formula}`")])


def index(comparison: Comparison) -> str:
    """The text of the index page."""
    parts = [
        "# Mechanisms of attention",
        ABOUT_INDEX,
    ]
    rows = [(MECHANISMS[row.name], row) for row in comparison.rows]
    order = list(dict.fromkeys(folder(cls)[0] for cls, _ in rows))
    folders = sorted(rows, key=lambda pair: order.index(folder(pair[0])[0]))
    head = ("mechanism", "formula", "difference", "operations", "paper")
    for (name, about), group in groupby(folders, key=lambda pair: folder(pair[0])):
        lines = [
            (
                f"[{cls.__name__}]({cls.name}.md)",
                f"`{cls.formula}`",
                number(row.difference),
                f"{int(mechanism_cost(cls.name, 1_000).ledger.total):,}",
                cls.paper,
            )
            for cls, row in group
        ]
        parts += [f"## {name}", about, table(head, lines)]
    return "\n\n".join(parts) + "\n"


def folder(cls: type[Mechanism]) -> tuple[str, str]:
    """The folder of a class, and what it says of itself."""
    package = sys.modules[cls.__module__.rpartition(".")[0]]
    title = package.__name__.rpartition(".")[2].replace("_", " ").capitalize()
    return title, (inspect.getdoc(package) or "").partition("\n\n")[0]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def fence(language: str, text: str) -> str:
    """A block of code in Markdown."""
    return f"```{language}\n{text}\n```"


def number(value: float) -> str:
    """Four decimals, and no sign of a zero."""
    return f"{float(np.round(value, 4)) + 0.0:.4f}"


def pages() -> dict[str, str]:
    """File name to text, of all pages."""
    comparison = compare()
    made = {
        f"{row.name}.md": page(MECHANISMS[row.name], row, comparison.tokens)
        for row in comparison.rows
    }
    return {"README.md": index(comparison), **made}


def main() -> None:
    """Write the pages."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    made = pages()
    PAGES.mkdir(parents=True, exist_ok=True)
    for old in PAGES.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (PAGES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
