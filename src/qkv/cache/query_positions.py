"""Where queries stand among the tokens of a cache, and whether it has the keys that they read."""

from __future__ import annotations

from typing import Any

import numpy as np

import qkv
from qkv.arguments.declarations import shown
from qkv.arguments.readable_checks import as_array
from qkv.arrays import kind_of
from qkv.cache.arguments import Lengths
from qkv.call.binding.bound import ARRAY_TYPES
from qkv.errors import ShapeError
from qkv.variants.masks.algebra import AllOf, AnyOf, Not

__all__ = ["check_row_count", "check_window", "q_len_of", "without_end"]


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
