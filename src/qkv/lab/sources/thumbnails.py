"""Small pictures of where the heads of a layer read, at any length.

Each number of a picture is the largest weight of a block of pairs, since a mean would hide a single
key with much weight. Of long texts evenly spaced queries are drawn, so that no picture takes a pass
over all pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.inspection.weights.replay import Replay
from qkv.lab.sources.heads import EXACT_KEYS, HeadLayer

__all__ = ["queries_drawn", "thumbnails"]

_SIDE, _SMALL_SIDE = 64, 32
_MOST_LARGE = 256
"""The most heads of a model with which pictures have the larger side."""

_WEIGHTS = 1 << 18
"""The number of weights that are computed for one picture with more queries than rows."""

_STEP = 1 << 22
"""The most weights that are held at a time."""


def queries_drawn(layer: HeadLayer, num_heads: int) -> int:
    """The number of queries whose weights a picture shows; `num_heads` are those of all layers."""
    if layer.replay is None:
        return layer.q_len
    most = max(_side(num_heads), _WEIGHTS // max(layer.kv_len, 1))
    return min(layer.q_len, most)


def thumbnails(layer: HeadLayer, num_heads: int) -> NDArray[np.uint8]:
    """The pictures of all heads of a layer, `(heads, rows, columns)`: 255 sqrt(weight).

    Of a layer that kept no query and key, the best keys of each query are drawn.
    """
    side = _side(num_heads)
    height, width = (min(side, length) for length in (layer.q_len, layer.kv_len))
    pictures = np.zeros((layer.num_heads, height, width))
    queries = queries_drawn(layer, num_heads)
    for head, picture in enumerate(pictures):
        if not picture.size:
            continue
        if layer.replay is None:
            keys, weights = layer.top(head, 0, layer.q_len)
            rows = np.broadcast_to(np.arange(layer.q_len)[:, None], keys.shape)
            there = keys >= 0
            places = rows[there] * height // layer.q_len, keys[there] * width // layer.kv_len
            np.maximum.at(picture, places, np.nan_to_num(weights[there]))
        else:
            _draw(picture, layer.replay, head, queries)
    steps: NDArray[np.uint8] = np.rint(255 * np.sqrt(np.clip(pictures, 0, 1))).astype(np.uint8)
    return steps


def _draw(picture: NDArray[Any], replay: Replay, head: int, count: int) -> None:
    """Write the largest weight of each block of pairs, of `count` evenly spaced queries."""
    q_len, kv_len = replay.problem.spec.q_len, replay.problem.spec.kv_len
    height, width = picture.shape
    keys = np.arange(kv_len)
    first_keys = -(-np.arange(width) * kv_len // width)
    exact = kv_len <= EXACT_KEYS
    step = max(1, _STEP // kv_len)
    for start in range(0, count, step):
        drawn = np.arange(start, min(start + step, count))
        weights = replay.whole_rows(0, head, drawn * q_len // count, keys, exact=exact)
        np.fmax(weights, 0, out=weights)  # NaN becomes 0.
        np.maximum.at(
            picture, drawn * height // count, np.maximum.reduceat(weights, first_keys, axis=1)
        )


def _side(num_heads: int) -> int:
    return _SIDE if num_heads <= _MOST_LARGE else _SMALL_SIDE
