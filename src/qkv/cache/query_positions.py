"""Where queries stand among the tokens of a cache, and whether it has the keys that they read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import qkv
from qkv.arguments.declarations import shown
from qkv.arguments.readable_checks import as_array
from qkv.arrays import kind_of
from qkv.cache.arguments import Lengths
from qkv.call.binding.bound import ARRAY_TYPES
from qkv.errors import ShapeError, UnsupportedError
from qkv.variants.masks.algebra import AllOf, AnyOf, Not

__all__ = [
    "READ_DIFFERENCES",
    "check_dropped",
    "check_row_count",
    "check_segments",
    "check_window",
    "q_len_of",
    "reads_positions",
    "restarts",
    "without_end",
]


def q_len_of(query: Any) -> int | None:
    """The number of rows of a query, None if it is no dense array of two or more dimensions."""
    if type(query) not in ARRAY_TYPES and kind_of(query) is None:
        return None
    if getattr(query, "is_nested", False) or query.ndim < 2:
        return None
    return int(query.shape[-2])


def without_end(variant: Any) -> Any:
    """The same mask with `Causal()` in the place of each `Causal("end")`; itself if it has none."""
    if isinstance(variant, qkv.Causal):
        return qkv.Causal() if variant.align == "end" else variant
    if isinstance(variant, Not):
        bare = without_end(variant.mask)
        return variant if bare is variant.mask else Not(bare)
    if not isinstance(variant, AllOf | AnyOf):
        return variant
    masks = tuple([without_end(mask) for mask in variant.masks])
    unchanged = all(a is b for a, b in zip(masks, variant.masks, strict=True))
    return variant if unchanged else type(variant)(masks)


def restarts(variant: Any) -> bool:
    """Whether positions begin again in the segments of a variant."""
    return any(isinstance(each, qkv.Segments) for each in _combined(variant))


def reads_positions(variant: Any) -> bool:
    """Whether a variant may read positions, and not only rows or scores."""
    return any(map(_reads_positions, _combined(variant)))


def _reads_positions(variant: Any) -> bool:
    if isinstance(variant, qkv.Mask):
        return callable(variant.array)
    return type(variant) not in _WITHOUT_POSITIONS and kind_of(variant) is None


def _combined(variant: Any) -> Iterator[Any]:
    """The masks that are combined in one; the variant itself if it is no combination."""
    if isinstance(variant, Not):
        yield from _combined(variant.mask)
    elif isinstance(variant, AllOf | AnyOf):
        for mask in variant.masks:
            yield from _combined(mask)
    else:
        yield variant


READ_DIFFERENCES = frozenset(
    {qkv.ALiBi, qkv.Causal, qkv.RelativeBias, qkv.RoPE, qkv.Sinks, qkv.SlidingWindow, qkv.Softcap}
)
"""Variants that read no position of a query or a key, only how far they are apart."""

_WITHOUT_POSITIONS = frozenset(
    {
        qkv.Bias,
        qkv.BlockSparse,
        qkv.Dropout,
        qkv.KeyLengths,
        qkv.Segments,
        qkv.Sinks,
        qkv.Softcap,
    }
)


def check_segments(q_offset: Any, end: Lengths, kv_offset: Any) -> bool:
    """Whether queries are the last tokens of their sequences; an error unless the first or last.

    In segments an integer moves the queries of all segments alike, so that others have no position
    in each of them.

    Parameters
    ----------
    q_offset : int or integer array
        Position of query row 0 in its sequence.
    end : int64 array
        That position where the last query is the last token.
    kv_offset : int or int64 array
        Position of key row 0.
    """
    first = np.asarray(q_offset)
    if first.dtype.kind in "iu" and not np.any(kv_offset):
        if np.all(first == end):
            return True
        if not first.any():
            return False
    raise UnsupportedError(
        "positions begin again in each segment, and these queries are neither the first nor the "
        "last tokens of their sequences.",
        [("q_offset", shown(q_offset)), ("of the last tokens", shown(end))],
        "Append as many tokens to each sequence, without window, and attend from those, or pass "
        "the mask (ids[:, None] == ids) in the place of Segments: positions go on then.",
    )


def check_dropped(variants: Sequence[Any], kv_offset: Any) -> None:
    """Raise an error if a variant reads how many tokens of a segment a rolling cache dropped."""
    if not np.any(kv_offset):
        return
    for variant in variants:
        for each in _combined(variant):
            if _reads_positions(each) and type(each) not in READ_DIFFERENCES:
                raise UnsupportedError(
                    "positions begin again in each segment, and the cache no longer has the "
                    f"tokens from which {shown(each)} counts.",
                    [("dropped", f"keys before {shown(kv_offset)}")],
                    "Use a cache without a window.",
                )


def check_row_count(q_len: int, new: int) -> None:
    """Raise an error if there are not as many queries as appended tokens, at which they stand."""
    if q_len == new:
        return
    were = "was" if new == 1 else "were"
    raise ShapeError(
        f"query has {_rows(q_len)} and {_rows(new)} {were} appended; query row 0 would stand at "
        "the first of them.",
        [("query", f"q_len={q_len}"), ("appended", f"new={new}")],
        'Pass q_offset="end" to put the last query at the last key.',
    )


def check_window(q_offset: Any, window: int, kv_offset: Lengths) -> None:
    """Raise an error if keys in the window of a query have been dropped."""
    first = as_array("q_offset", 0 if isinstance(q_offset, str) else q_offset)
    if first.dtype.kind not in "iu":
        return  # `attention` says what is wrong with it.
    try:
        first, kept = np.broadcast_arrays(first, kv_offset)
    except ValueError:
        return
    gone = (kept > 0) & (first - (window - 1) < kept)
    if gone.any():
        where = tuple(int(i) for i in np.argwhere(gone)[0])
        of_sequence = f" of sequence {where}" if where else ""
        raise ShapeError(
            f"the window of query row 0{of_sequence} begins at position "
            f"{max(first[where] - (window - 1), 0)}; keys before {kept[where]} are gone.",
            [("q_offset", f"{shown(q_offset)}"), ("window", f"{window}")],
            f"Begin with the query at position {kept[where] + window - 1}.",
        )


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"
