"""Variants over the tokens of a cache, continued to its rows: those of pages, those of the longest
sequence.

The rows behind the last token are forbidden by `KeyLengths`, so that what is said of them never
matters; but arrays must have a column for each of them, and segments must not count them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

import qkv
from qkv.arguments.readable_checks import as_array
from qkv.arrays import is_array
from qkv.arrays.views import view
from qkv.variants.masks.algebra import AllOf, AnyOf, Not

__all__ = ["continued"]


def continued(variant: Any, tokens: int, rows: int, lens: Any) -> Any:
    """The variant for that many rows; itself if it has no column for each token.

    `lens` are the tokens of each sequence, and `tokens` those of the longest.
    """
    if isinstance(variant, Not):
        return Not(continued(variant.mask, tokens, rows, lens))
    if isinstance(variant, AllOf | AnyOf):
        return type(variant)(tuple([continued(mask, tokens, rows, lens) for mask in variant.masks]))
    if isinstance(variant, qkv.Segments):
        return _segments(variant, tokens, rows, np.asarray(lens))
    if isinstance(variant, qkv.BlockSparse):
        before, after = (-(-columns // variant.block_kv) for columns in (tokens, rows))
        mask = _longer(as_array("mask", variant.mask), before, after, fill=False)
        return variant if mask is None else replace(variant, mask=mask)
    if isinstance(variant, qkv.RandomBlocks):
        return replace(variant, length=tokens) if variant.length is None else variant
    array: Any = variant.array if isinstance(variant, qkv.Mask | qkv.Bias) else variant
    if not is_array(array) or getattr(array, "is_nested", False) or not array.ndim:
        return variant  # `attention` refuses what is wrong with it.
    known = view(array, "mask")
    if known.dtype != bool and known.dtype.kind in "iu":
        return variant
    is_mask = known.dtype == bool
    longer = _longer(known, tokens, rows, fill=False if is_mask else -np.inf)
    if longer is None:
        return variant
    return qkv.Mask(longer) if is_mask else qkv.Bias(longer)


def _segments(variant: qkv.Segments, tokens: int, rows: int, lens: Any) -> qkv.Segments:
    """Segments in which the rows behind the end of a sequence have a segment of their own."""
    q_ids = as_array("q_ids", variant.q_ids)
    kv_ids = q_ids if variant.kv_ids is None else as_array("kv_ids", variant.kv_ids)
    if kv_ids.dtype.kind not in "iu" or q_ids.dtype.kind not in "iu" or not kv_ids.ndim:
        return variant
    kv_ids = kv_ids.astype(np.int64 if kv_ids.dtype.kind == "i" else np.uint64)
    fill = max(int(ids.max(initial=0)) for ids in (q_ids, kv_ids)) + 1
    if fill > np.iinfo(kv_ids.dtype).max:
        used = {int(number) for ids in (q_ids, kv_ids) for number in ids.flat}
        fill = next(number for number in count() if number not in used)
    longer = _longer(kv_ids, tokens, rows, fill=fill)
    if longer is None:
        return variant
    behind = np.arange(rows) >= lens[..., None]
    return replace(variant, kv_ids=np.where(behind, kv_ids.dtype.type(fill), longer))


def _longer(array: Any, before: int, after: int, *, fill: Any) -> Any:
    """An array with more columns; None if it has another number of them than `before`."""
    if not array.ndim or array.shape[-1] != before:
        return None
    tail = np.full((*array.shape[:-1], after - before), fill, array.dtype)
    return np.concatenate([array, tail], axis=-1)
