"""`qkv scaling`: why scores are divided by sqrt(d_k)."""

from __future__ import annotations

import argparse

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = (
    "Variance of the scores, largest weight, entropy, trace of the softmax's Jacobian and gradient "
    "through the runner-up for d_k from 1 to 1024, with and without the divisor."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--json", action="store_true", help="strict JSON")
    parser.add_argument("--plot", metavar="FILE", help="also draw it: .svg, .png or .pdf")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default 0)")
    parser.add_argument(
        "--draws", type=int, default=200_000, metavar="N", help="rows of scores (default 200000)"
    )


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    from rich.text import Text

    import qkv
    from qkv.inspection.summaries.terminal import Page

    curve = qkv.scaling_curve(draws=options.draws, seed=options.seed)
    if options.plot is not None:
        curve.plot(options.plot)
    if options.json:
        return curve.to_json() + "\n"
    page = Page()
    table = page.table(
        ">d_k", "scores", ">variance", ">largest weight", ">entropy", ">Jacobian trace",
        ">runner-up gradient",
    )  # fmt: skip
    for point in curve.points:
        table.add_row(
            str(point.d_k),
            "/ sqrt(d_k)" if point.scaled else "as they are",
            f"{point.score_variance:.2f}",
            f"{point.max_weight:.4f}",
            f"{point.entropy_nats:.4f}",
            f"{point.jacobian_trace:.4f}",
            f"{point.runner_up_gradient:.4f}",
        )
    about = (
        f"Means over {curve.draws:,} queries with five keys each, of d_k unit-normal numbers, seed "
        f"{curve.seed}; entropy in nats, units of the natural logarithm. Without the divisor "
        "scores have variance d_k: one weight takes everything and no gradient passes."
    )
    return page.render(Text(about), table)
