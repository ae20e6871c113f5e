"""The texts of records, as `print` shows them and `qkv inspect` prints them.

record           the text of one call
heads_text       a table of heads, and where the notable ones look
head_statistics  the numbers of that table
model            the map of a model's heads
terminal         tables and tokens for terminals, by rich
"""

from __future__ import annotations

import re
from html import escape

__all__ = ["in_html"]


def in_html(text: str) -> str:
    """A text as notebooks show it, without the colours of a terminal."""
    return f"<pre>{escape(re.sub(_COLOUR, '', text))}</pre>"


_COLOUR = r"\x1b\[[0-9;]*m"
