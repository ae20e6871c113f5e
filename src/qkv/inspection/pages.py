"""Results as pages of HTML and as text, which are written by whoever offers to.

A page shows more than inspection knows of: examples, mechanisms, the source of what it computes.
The text is that of the command line. So the writers are above this package, and are handed in where
the package `qkv` is put together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any, Protocol

from qkv.errors import UnsupportedError

__all__ = [
    "PageWriter", "SummaryWriter", "page_of", "summary_in_html", "summary_of", "write_pages_with",
    "write_summaries_with",
]  # fmt: skip


class PageWriter(Protocol):
    """Makes one HTML file of a record, a model record or a trace."""

    def __call__(self, shown: Any, tokens: Sequence[str] | None) -> str: ...


class SummaryWriter(Protocol):
    """Makes the text of a record or a model record."""

    def __call__(self, shown: Any, tokens: Sequence[str] | None, batch: int) -> str: ...


_writer: PageWriter | None = None
_summary_writer: SummaryWriter | None = None


def write_summaries_with(writer: SummaryWriter | None) -> None:
    """Let `writer` make the texts of `summary`; None takes it back."""
    global _summary_writer
    _summary_writer = writer


def summary_of(shown: Any, tokens: Sequence[str] | None = None, batch: int = 0) -> str:
    """The text of a result.

    Raises
    ------
    UnsupportedError
        Nobody writes summaries.
    """
    if _summary_writer is None:
        raise UnsupportedError("nothing writes summaries.", action="Use repr(record).")
    return _summary_writer(shown, tokens, batch)


def summary_in_html(shown: Any) -> str:
    """The text of a result as notebooks show it, without the colours of a terminal."""
    return f"<pre>{escape(re.sub(_COLOUR, '', summary_of(shown)))}</pre>"


_COLOUR = r"\x1b\[[0-9;]*m"


def write_pages_with(writer: PageWriter | None) -> None:
    """Let `writer` make the pages of `to_html`; None takes it back."""
    global _writer
    _writer = writer


def page_of(shown: Any, tokens: Sequence[str] | None = None) -> str:
    """The page of a result.

    Parameters
    ----------
    shown : Record, ModelRecord or Trace
    tokens : sequence of str, optional
        Names of the keys, where the result does not know them.

    Raises
    ------
    UnsupportedError
        Nobody writes pages.
    """
    if _writer is None:
        raise UnsupportedError(
            "nothing writes pages.", action="Use qkv.lab.to_html, or write_pages_with(writer)."
        )
    return _writer(shown, tokens)
