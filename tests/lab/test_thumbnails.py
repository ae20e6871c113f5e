"""Pictures of all heads, beside weights from the definition."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.inspection.models.model_record import ModelRecord
from qkv.lab.document import export_data
from qkv.lab.session import Session
from qkv.lab.sources.source import source_of
from qkv.lab.sources.weight_map import TILE

HALF = 0.5
"""A picture has whole numbers."""


def arrays(q_len: int, kv_len: int, heads: int = 3) -> tuple[Any, Any, Any]:
    """Query and key, and their causal weights from the definition."""
    rng = np.random.default_rng(q_len)
    q, k = (rng.normal(size=(heads, length, 8)).astype(np.float32) for length in (q_len, kv_len))
    scores = 3 * q.astype(float) @ k.astype(float).swapaxes(1, 2) / np.sqrt(8)
    scores = np.where(np.tri(q_len, kv_len, kv_len - q_len, dtype=bool), scores, -np.inf)
    exp = np.exp(scores - scores.max(axis=2, keepdims=True))
    return q * 3, k, exp / exp.sum(axis=2, keepdims=True)


def blocks(weights: Any, height: int, width: int, queries: Sequence[int]) -> Any:
    """The largest weight of each block of pairs, by a loop over all of them."""
    found = np.zeros((height, width))
    for place, query in enumerate(queries):
        for key, weight in enumerate(weights[query]):
            at = place * height // len(queries), key * width // weights.shape[1]
            found[at] = max(found[at], weight)
    return 255 * np.sqrt(found)


def pictures(session: Session, layer: int = 0) -> tuple[dict[str, Any], Any]:
    answer = session.answer("thumbnails", {"layer": layer})
    (found,) = answer.arrays
    assert found.dtype == np.uint8
    return answer.result, found


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (64, 64), (100, 300), (1, 70)])
def test_a_picture_holds_the_largest_weight_of_each_block(q_len: int, kv_len: int) -> None:
    q, k, exact = arrays(q_len, kv_len)
    record = qkv.inspect(q, k, k, qkv.Causal(), q_offset="end")
    about, found = pictures(Session(source_of(record)))
    assert about == {"queries": q_len}
    assert found.shape == (3, min(q_len, 64), min(kv_len, 64))
    for picture, weights in zip(found, exact, strict=True):
        wanted = blocks(weights, *picture.shape, range(q_len))
        np.testing.assert_allclose(picture, wanted, atol=HALF + 1e-3)


def test_of_a_long_text_evenly_spaced_queries_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.lab.sources.thumbnails._WEIGHTS", 300 * 90)
    # Several steps, the last of them short.
    monkeypatch.setattr("qkv.lab.sources.thumbnails._STEP", 300 * 7)
    q, k, exact = arrays(300, 300)
    record = qkv.inspect(q, k, k, qkv.Causal())
    about, found = pictures(Session(source_of(record)))
    assert about["queries"] == 90
    for picture, weights in zip(found, exact, strict=True):
        wanted = blocks(weights, 64, 64, [i * 300 // 90 for i in range(90)])
        np.testing.assert_allclose(picture, wanted, atol=HALF + 1e-3)


@pytest.mark.parametrize("keep", [None, "weights"])
def test_layers_of_a_model_with_and_without_their_weights(keep: Any) -> None:
    """Where nothing else was kept, the four best keys of each query are drawn."""
    record = ModelRecord("two layers", keep=keep)
    exact = []
    for length in (90, 91):
        q, k, weights = arrays(length, length)
        record.add(q[None], k[None], qkv.Causal(), name=str(length))
        if keep is None:
            fourth = -np.sort(-weights)[..., 3:4]
            weights = np.where(weights >= fourth, weights, 0)
        exact.append(weights)
    session = Session(source_of(record))
    for layer, all_weights in enumerate(exact):
        _, found = pictures(session, layer)
        length = all_weights.shape[1]
        for picture, weights in zip(found, all_weights, strict=True):
            wanted = blocks(weights, 64, 64, range(length))
            np.testing.assert_allclose(picture, wanted, atol=HALF + 1e-3)


def test_pictures_of_many_heads_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.lab.sources.thumbnails._MOST_LARGE", 2)
    q, k, _ = arrays(40, 40)
    assert pictures(Session(source_of(qkv.inspect(q, k, k))))[1].shape == (3, 32, 32)


def test_a_file_has_the_pictures_of_all_heads_also_where_it_has_no_map() -> None:
    q, k, exact = arrays(TILE + 1, TILE + 1)
    results = export_data(Session(source_of(qkv.inspect(q, k, k, qkv.Causal()))))["results"]
    assert not any(name.startswith("tile:") for name in results)
    (buffer,) = results['thumbnails:{"layer":0}']["buffers"]
    assert (buffer["dtype"], buffer["shape"]) == ("uint8", [3, 64, 64])
    found = np.frombuffer(base64.b64decode(buffer["base64"]), np.uint8).reshape(buffer["shape"])
    wanted = blocks(exact[1], 64, 64, range(TILE + 1))
    np.testing.assert_allclose(found[1], wanted, atol=HALF + 1e-3)


def test_a_layer_without_rows_has_no_picture() -> None:
    x = np.zeros((2, 0, 4), np.float32)
    found = pictures(Session(source_of(qkv.inspect(x, x, x))))[1]
    assert found.shape == (2, 0, 0)
