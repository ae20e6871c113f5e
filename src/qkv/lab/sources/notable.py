"""Where a page of many heads opens: at a head and a query that show something."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qkv.lab.sources.heads import ALL_KINDS, HeadLayer, Heads

__all__ = ["notable_place"]

Array = NDArray[Any]
_Place: TypeAlias = tuple[HeadLayer, int, int]
"""A layer, a head of it and a query."""

_FINDING = ("induction", "duplicate")
"""Kinds of heads that find a token by its content; other kinds read at a fixed offset."""

_FAR = 4
"""The least distance of a query and a key at which the key counts as distant."""

_NEARLY = 0.9
_STRONG = 0.2
_PAIRS = 3
_MOST_PAIRS = 1 << 24
"""The most pairs of a query and a key, over all heads, that are searched for distant ones."""


def notable_place(heads: Heads) -> dict[str, int]:
    """A layer, head, query and key to begin with.

    The first choice is the head with most weight on tokens that it finds by their content; the
    second, of heads without a kind, the one with the strongest weights on distant tokens; the third
    the head with the highest score of its own kind; the last the first head. For a head with a
    kind, the query is one that shows this kind.
    """
    if not heads.layers:
        return {"layer": 0, "head": 0, "query": 0, "kkey": 0}
    rows = [(layer, row) for layer in heads.layers for row in layer.rows()]
    place = _of_kind(rows, _FINDING)
    if place is None:
        free = {(layer.index, row["head"]) for layer, row in rows if row["kind"] is None}
        place = _distant(heads, free) or _of_kind(rows, ALL_KINDS) or (heads.layers[0], 0, 0)
    layer, head, query = place
    if not (layer.q_len and layer.kv_len):
        return {"layer": layer.index, "head": head, "query": 0, "kkey": 0}
    keys, _ = layer.top(head, query, query + 1)
    return {"layer": layer.index, "head": head, "query": query, "kkey": max(0, int(keys[0, 0]))}


def _of_kind(
    rows: Sequence[tuple[HeadLayer, dict[str, Any]]], kinds: Sequence[str]
) -> _Place | None:
    """The head with the largest score of the first of some kinds that is there."""
    for kind in kinds:
        of_kind = [(row[kind], layer, row["head"]) for layer, row in rows if row["kind"] == kind]
        if of_kind:
            _, layer, head = max(of_kind, key=lambda each: each[0])
            return layer, head, _clear_query(layer.by_query(kind)[head])
    return None


def _clear_query(weights: Array) -> int:
    """The query nearest to 3/4 of the text among those whose weight is nearly the largest."""
    there = np.nan_to_num(weights, nan=-1.0)
    most = there.max()
    clear = np.flatnonzero(there >= min(most, _NEARLY * most))
    return int(clear[np.abs(clear - 3 * len(weights) // 4).argmin()])


def _distant(heads: Heads, free: Collection[tuple[int, int]]) -> _Place | None:
    """The head of `free` whose strongest distant pairs have most weight, and its best query."""
    place, most = None, 0.0
    room = _MOST_PAIRS
    for layer in heads.layers:
        room -= layer.num_heads * layer.q_len * layer.kv_len
        if room < 0:
            break
        for head in range(layer.num_heads):
            if (layer.index, head) not in free:
                continue
            keys, weights = layer.top(head, 0, layer.q_len)
            queries = np.arange(layer.q_len)[:, None]
            far = (keys > 0) & (abs(queries - keys) >= _FAR) & (weights >= _STRONG)
            shares = np.where(far, weights, 0)
            best = np.sort(shares, axis=None)[-_PAIRS:].sum()
            if best > most:
                row = int(shares.max(axis=1).argmax())
                place, most = (layer, head, row), float(best)
    return place
