"""Results as pages of HTML, which are written by whoever offers to.

A page shows more than inspection knows of: examples, mechanisms, the source of what it computes.
So the writer is above this package, and is handed in where the package `qkv` is put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from qkv.errors import UnsupportedError

__all__ = ["PageWriter", "page_of", "write_pages_with"]


class PageWriter(Protocol):
    """Makes one HTML file of a record, a model record or a trace."""

    def __call__(self, shown: Any, tokens: Sequence[str] | None) -> str: ...


_writer: PageWriter | None = None


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
