"""Command-line options that name a model and what it reads."""

from __future__ import annotations

import argparse

__all__ = ["add_model_options"]


def add_model_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Let a command take a model of transformers, or one that is shipped."""
    parser.add_argument(
        "--model", metavar="NAME", help="folder or name of a transformers model, tiny, language"
    )
    parser.add_argument(
        "--text", metavar="TEXT", help="what it reads: a text, a file, or - (default: a paragraph)"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="read only the first N tokens")
    parser.add_argument(
        "--download", action="store_true", help="fetch the model if it is not on this machine"
    )
