"""Make tokens safe and short before they reach a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from qkv.errors import ArgumentError
from qkv.inspection.rendering.counts import counted

LONGEST = 24
"""Characters of a token that are shown."""

# Control sequences (colours, cursor), strings (titles, links) and single escapes, in both the
# 7-bit and the 8-bit form. A sequence that never ends includes the rest of the token.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f]).*?(?:\x07|\x1b\\|\x9c|\Z)"
    r"|\x1b[ -/]*[0-~]?",
    re.DOTALL,
)


def require_names(tokens: Sequence[str] | None, kv_len: int) -> None:
    """Refuse names of keys, if there are any, that are not one for each key.

    Raises
    ------
    ArgumentError
        There are more or fewer.
    """
    if tokens is not None and len(tokens) != kv_len:
        raise ArgumentError(
            f"there are {counted(len(tokens), 'token')} for {counted(kv_len, 'key')}.",
            action="Give one token for each key.",
        )


def printable(token: str, longest: int = LONGEST) -> str:
    r"""The token without terminal escapes, other unprintable characters written as `\n`, `\u202e`.

    At most `longest` characters; a longer one is cut and ends in "...".
    """
    plain = _ESCAPES.sub("", token)
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in plain[: longest + 1])
    return shown if len(shown) <= longest else shown[: longest - 3] + "..."


def joined(tokens: Sequence[str]) -> str:
    """Tokens as one text: with spaces between whole words that come without their own.

    Examples
    --------
    >>> joined(["the", " cat"]), joined(["the", "cat"]), joined(["c", "a", "t"])
    ('the cat', 'the cat', 'cat')
    """
    apart = max(map(len, tokens), default=0) > 1 and not any(re.search(r"\s", t) for t in tokens)
    return " ".join(tokens) if apart else "".join(tokens)


def columns(text: str) -> int:
    """Columns that printable text takes in a terminal."""
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )
