"""`qkv compare`: all mechanisms on the same five tokens, as a table, JSON or a picture."""

from __future__ import annotations

import argparse

from rich.text import Text

from qkv.inspection.summaries.terminal import Page
from qkv.mechanisms.comparison import Comparison, compare

__all__ = ["run"]


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    comparison = compare(options.mechanisms)
    if options.plot is not None:
        comparison.plot(options.plot)
    return comparison.to_json(2) + "\n" if options.json else _text(comparison)


def _text(comparison: Comparison) -> str:
    page = Page()
    # The middle token is shown because it has tokens before and after it.
    index = len(comparison.tokens) // 2
    token = comparison.tokens[index]
    table = page.table("mechanism", f"weights of {token}", f"output of {token}", ">difference")
    for row in comparison.rows:
        weights = " ".join(f"{weight:.2f}" for weight in row.mixing[:, index].mean(axis=0))
        output = " ".join(f"{number:.2f}" for number in row.output[index])
        table.add_row(*map(Text, (row.name, weights, output, f"{row.difference:.4f}")))
    lines = [
        f"Tokens: {' '.join(comparison.tokens)}. Q, K and V are those of qkv explain.",
        "Weights are averaged over heads; where there are none, an effective token-mixing matrix.",
        "Difference: the largest of any token, from softmax(Q K^T / sqrt(d)) V.",
        *_of_causal_ones(comparison),
        f"Step by step: qkv explain --mechanism {comparison.rows[0].name}",
    ]
    return page.render(table, Text(), *map(Text, lines))


def _of_causal_ones(comparison: Comparison) -> list[str]:
    """Why causal mechanisms differ, which says nothing of how else they compute."""
    names = ", ".join(row.name for row in comparison.rows if row.causal)
    said = "In these no token reads a later one, and in full attention all do, so they differ: "
    return [f"{said}{names}."] if names else []
