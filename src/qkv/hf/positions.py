"""How many positions a model has, and a warning where a text has more tokens."""

from __future__ import annotations

import warnings
from typing import Any

__all__ = ["positions_of", "warn_beyond"]


def positions_of(config: Any) -> int | None:
    """`max_position_embeddings` of the text part; None where a configuration does not say it."""
    text: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None
    longest = getattr(text, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def warn_beyond(count: int, positions: int) -> None:
    """Say that tokens have positions that the model was not made for.

    Models with rotary positions compute on without an error, and what they give means little.
    """
    warnings.warn(
        f"the text has {count} tokens; the model has {positions} positions "
        "(max_position_embeddings). What it computes beyond them means little. Shorten the text, "
        "or set rope_parameters to a scaling for longer ones.",
        UserWarning,
        stacklevel=3,
    )
