"""How many positions a model has; an error or a warning where a text has more tokens."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch

from qkv.arguments.declarations import is_integer
from qkv.errors import ArgumentError

__all__ = ["can_be_scaled", "positions_of", "require_positions", "warn_beyond"]

_TABLE = re.compile(r"(^|\.)(wpe|position_embeddings?|embed_positions|positions_embed)$")
"""Names of modules that look positions up in a table."""
_NO_TEXT = re.compile(r"vision|image|visual|audio|speech")


def positions_of(config: Any) -> int | None:
    """`max_position_embeddings` of the text part.

    None where a configuration does not say it, or frequencies are "dynamic": made for each length.
    """
    text = _text_config(config)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [of.get("rope_type") for of in (rope, *rope.values()) if isinstance(of, dict)]
    if {*kinds} - {None} == {"dynamic"}:
        return None
    longest = getattr(text, "max_position_embeddings", None)
    return longest if is_integer(longest) and longest > 0 else None


def require_positions(model: torch.nn.Module, count: int, decoder: bool = False) -> None:
    """Refuse tokens that the table of learned positions of a model has no row for.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    count : int
        Tokens of the text.
    decoder : bool
        Of the text of the decoder, in a model of two sequences.

    Raises
    ------
    ArgumentError
        There are more tokens than rows.
    """
    rows = _learned_positions(model, decoder)
    if rows is not None and count > rows:
        raise ArgumentError(
            f"the text has {count} tokens; {type(model).__name__} has {rows} learned positions.",
            action=f"Shorten the text to {rows} tokens.",
        )


def _learned_positions(model: torch.nn.Module, decoder: bool) -> int | None:
    """Rows of the table of learned positions that tokens can have; None without such a table."""
    config = getattr(model, "config", None)
    text = _text_config(config)
    # ESM has a table also where its positions are rotary, and does not read it then.
    if getattr(text, "position_embedding_type", "absolute") != "absolute":
        return None
    both = getattr(config, "is_encoder_decoder", False)
    rows = [
        table.num_embeddings - _rows_before(table)
        for name, table in model.named_modules()
        if _TABLE.search(name)
        and not _NO_TEXT.search(name)
        and _is_learned(table)
        and (not both or bool(re.search(r"(^|\.)decoder\.", name)) == decoder)
    ]
    return min(rows, default=None)


def _is_learned(table: torch.nn.Module) -> bool:
    """Other kinds of tables are made longer, or read at their last row beyond their end."""
    kind = type(table)
    return kind is torch.nn.Embedding or (
        isinstance(table, torch.nn.Embedding) and "Learned" in kind.__name__
    )


def _rows_before(table: Any) -> int:
    """Rows of a table before that of the first token."""
    if table.padding_idx is not None:
        return int(table.padding_idx) + 1
    return int(getattr(table, "offset", 0))


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None


def can_be_scaled(config: Any) -> bool:
    """Whether positions are rotary, so that a scaling can make them reach further."""
    return bool(getattr(_text_config(config), "rope_parameters", None))


def warn_beyond(count: int, positions: int, scaled: bool) -> None:
    """Say that tokens have positions that the model was not made for.

    Models with rotary positions compute on without an error, and what they give means little.
    """
    more = ", or set rope_parameters to a scaling for longer ones" if scaled else ""
    warnings.warn(
        f"the text has {count} tokens; the model has {positions} positions "
        "(max_position_embeddings). What it computes beyond them means little. "
        f"Shorten the text{more}.",
        UserWarning,
        stacklevel=3,
    )
