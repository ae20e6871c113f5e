"""Where a page of many heads opens: at a head and a query that show something."""

from __future__ import annotations

import numpy as np

from qkv.inspection.head_scores import THRESHOLD
from qkv.lab.heads import HeadLayer, Heads

__all__ = ["notable_place"]

_FINDING = ("induction", "duplicate")
"""Kinds of heads that find a token by what it is; heads of other kinds read at a fixed place."""

_FAR = 4
"""Positions between a query and a key from which the key counts as further away."""

_STRONG = 0.2
_PAIRS = 3
_MOST_PAIRS = 1 << 24
"""Pairs of a query and a key, over all heads, that are searched for distant ones."""


def notable_place(heads: Heads) -> dict[str, int]:
    """A layer, head, query and key to begin with.

    The head with most weight on tokens that it finds by what they are, else the head with the
    strongest weights on distant tokens, else the first.
    """
    if not heads.layers:
        return {"layer": 0, "head": 0, "query": 0, "kkey": 0}
    for kind in _FINDING:
        scores = [
            (row.get(kind, np.nan), layer, row["head"])
            for layer in heads.layers
            for row in layer.rows()
        ]
        best, layer, head = max(scores, key=lambda score: np.nan_to_num(score[0], nan=-1.0))
        if best >= THRESHOLD:
            return _place(layer, head, 3 * layer.q_len // 4)
    layer, head, query = _distant(heads)
    return _place(layer, head, query)


def _place(layer: HeadLayer, head: int, query: int) -> dict[str, int]:
    """One query, and the key that it reads most."""
    if not (layer.q_len and layer.kv_len):
        return {"layer": layer.index, "head": head, "query": 0, "kkey": 0}
    keys, _ = layer.top(head, query, query + 1)
    return {"layer": layer.index, "head": head, "query": query, "kkey": max(0, int(keys[0, 0]))}


def _distant(heads: Heads) -> tuple[HeadLayer, int, int]:
    """The head whose strongest distant pairs have most weight, and the query of the first."""
    found, most = (heads.layers[0], 0, 0), 0.0
    room = _MOST_PAIRS
    for layer in heads.layers:
        room -= layer.num_heads * layer.q_len * layer.kv_len
        if room < 0:
            break
        for head in range(layer.num_heads):
            keys, weights = layer.top(head, 0, layer.q_len)
            queries = np.arange(layer.q_len)[:, None]
            far = (keys > 0) & (abs(queries - keys) >= _FAR) & (weights >= _STRONG)
            shares = np.where(far, weights, 0)
            best = np.sort(shares, axis=None)[-_PAIRS:].sum()
            if best > most:
                row = int(shares.max(axis=1).argmax())
                found, most = (layer, head, row), float(best)
    return found
