"""Mask functions of transformers, read as masks of qkv.

transformers composes a mask from closures (`and_masks(sliding_window_overlay(w),
causal_mask_function)`, ...) and evaluates the result for every pair. What it composes is a short
list of functions; those are recognised by their code object, and what they were made with is read
from their closure. Anything else (a function of the user's, one of a later version) is not
guessed at: it is then evaluated, pair by pair, by transformers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, reduce
from inspect import getclosurevars
from operator import and_, or_
from types import CodeType
from typing import Any

import torch
from transformers import masking_utils

from qkv.variants import Causal, MaskVariant, Segments, SlidingWindow
from qkv.variants.masks.same_group import SameGroup

__all__ = ["PositionRanges", "read"]

MaskFunction = Callable[..., Any]

_PACKED = "packed_sequence_mask_function"
_REMAPPED = "remap_positions_for_packed_sequence"
_MAKERS = (
    "and_masks",
    "or_masks",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "chunked_overlay",
    "blockwise_overlay",
    _PACKED,
    _REMAPPED,
)

_CAUSAL: tuple[MaskVariant, ...] = (Causal(),)


class _UnknownFunction(Exception):
    """The function is not one that this module recognises."""


@dataclass(frozen=True, slots=True)
class PositionRanges:
    """Positions of the query rows and the key rows of a call."""

    query: range
    key: range


def read(function: MaskFunction, rows: PositionRanges) -> tuple[MaskVariant, ...] | None:
    """Masks whose intersection is the mask function, None where it is not one that is known.

    Parameters
    ----------
    function : callable (batch, head, q_pos, kv_pos) -> bool
        As transformers hands it to a mask interface.
    rows : PositionRanges
        Where it will be evaluated.

    Notes
    -----
    In packed rows transformers counts positions from the start of each sequence; so does
    `Segments`. Masks that read more than the distance of two positions are not read there.
    """
    if function is masking_utils.causal_mask_function:
        return _CAUSAL
    parts = list(_factors(function))
    try:
        by_maker = {_made_by(part): part for part in parts}
        if len(parts) == 2 and by_maker.keys() == {_PACKED, _REMAPPED}:
            ids = _captured(by_maker[_PACKED])["packed_sequence_mask"]
            inner = _captured(by_maker[_REMAPPED])["mask_function"]
            return (Segments(ids), *_masks(inner, None))
        return tuple(mask for part in parts for mask in _masks(part, rows))
    except _UnknownFunction:
        return None


def _factors(function: MaskFunction) -> Iterable[MaskFunction]:
    """Functions whose intersection it is."""
    if _made_by(function) != "and_masks":
        return (function,)
    parts = _captured(function)["mask_functions"]
    return (factor for part in parts for factor in _factors(part))


def _masks(function: MaskFunction, rows: PositionRanges | None) -> list[MaskVariant]:
    """Masks whose intersection it is; none of them for "every pair"."""
    if function is masking_utils.bidirectional_mask_function:
        return []
    if function is masking_utils.causal_mask_function:
        return [Causal()]
    match _made_by(function):
        case "and_masks":
            return [mask for part in _factors(function) for mask in _masks(part, rows)]
        case "or_masks":
            parts = _captured(function)["mask_functions"]
            return _union([_masks(part, rows) for part in parts])
        case "sliding_window_overlay":
            return [_window(_captured(function)["sliding_window"])]
        case "sliding_window_bidirectional_overlay":
            width = _captured(function)["sliding_window"]
            return [SlidingWindow(width, width)]
        case "chunked_overlay" if rows is not None:
            return [_chunks(**_captured(function), rows=rows)]
        case "blockwise_overlay" if rows is not None:
            return [_blocks(**_captured(function), rows=rows)]
    raise _UnknownFunction


def _window(width: int) -> MaskVariant:
    """`kv_pos > q_pos - width`. Some configurations say 0 where they mean no window."""
    return SlidingWindow(width - 1, None) if width > 0 else ~SlidingWindow(None, -width)


def _chunks(chunk_size: int, left_padding: torch.Tensor, rows: PositionRanges) -> SameGroup:
    """Chunks of a fixed size, from the first token that is not padding."""
    first = left_padding[:, None]
    q_pos, kv_pos = (
        torch.arange(positions.start, positions.stop, device=first.device)
        for positions in (rows.query, rows.key)
    )
    return SameGroup((q_pos - first) // chunk_size, (kv_pos - first) // chunk_size)


def _blocks(block_sequence_ids: torch.Tensor, rows: PositionRanges) -> SameGroup:
    """Blocks by number; a negative number is a token outside them."""
    of_query = block_sequence_ids[:, rows.query.start : rows.query.stop]
    of_key = block_sequence_ids[:, rows.key.start : rows.key.stop]
    return SameGroup(of_query.clamp_min(-1), of_key.masked_fill(of_key < 0, -2))


def _union(alternatives: list[list[MaskVariant]]) -> list[MaskVariant]:
    if not all(alternatives):
        return []
    return [reduce(or_, [reduce(and_, masks) for masks in alternatives])]


def _made_by(function: MaskFunction) -> str | None:
    """The name of the function of transformers that made this closure."""
    return _known_code().get(getattr(function, "__code__", None))


def _captured(function: MaskFunction) -> dict[str, Any]:
    """The arguments that the closure captured."""
    return dict(getclosurevars(function).nonlocals)


@cache
def _known_code() -> dict[CodeType | None, str]:
    """Code of the inner function of each maker."""
    makers = {name: getattr(masking_utils, name, None) for name in _MAKERS}
    return {
        const: name
        for name, maker in makers.items()
        if maker is not None
        for const in maker.__code__.co_consts
        if isinstance(const, CodeType)
    }
