"""Layers and heads that the lab shows: of a model record, of one record, or of captured arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ArgumentError
from qkv.inspection.heads.head_scores import KINDS, LETTERS, MEANINGS, SCORES, THRESHOLD, kinds_of
from qkv.inspection.heads.head_table import mean_of_known
from qkv.inspection.models.layer_texts import query_texts
from qkv.inspection.models.model_record import LayerRecord, ModelRecord
from qkv.inspection.records.record import Record
from qkv.inspection.rendering.tokens import printable, require_names
from qkv.inspection.weights.replay import Replay
from qkv.problem.backward import shares_of_sinks
from qkv.variants.masks.causal import Causal

__all__ = [
    "ALL_KINDS", "EXACT_KEYS", "NOTE", "HeadLayer", "Heads", "heads_of_model", "heads_of_record",
    "shown",
]  # fmt: skip

Array = NDArray[Any]

NEXT = "next"
"""The kind of heads that read the next token, which only arrays without a causal mask have."""

ALL_KINDS = (*KINDS, NEXT)

NOTE = (
    "Attention is not explanation: weights show where a head reads, not why "
    "(Jain and Wallace, 2019)."
)

_LONGEST_TOKEN = 40
_TOP = 4
EXACT_KEYS = 1 << 13
"""The most keys for which rows are computed in float64."""
_ROWS = 1 << 22
"""The number of weights that are computed at a time for the best keys."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadLayer:
    """One layer of batch row 0.

    Attributes
    ----------
    index : int
    name : str
    num_heads, num_kv_heads, q_len, kv_len : int
    rows : callable () -> list of dict
        One row for each head: head, kind and each score.
    counted : callable () -> dict of str to int
        For each score, the queries that its mean is over.
    by_query : callable (score) -> array (num_heads, q_len)
        A score of each query, NaN where its mean leaves the query out.
    entropy : callable () -> array (num_heads, q_len)
    top : callable (head, first, stop) -> (indices, weights)
        The best keys of some queries, each `(stop - first, k)`.
    replay : Replay or None
        Computes weights, if query and key were kept.
    texts : sequence of str or None
        Its key tokens, where they are not those of the whole; empty if they are not known.
    q_texts : sequence of str or None
        Its query tokens, where queries and keys are of two sequences; empty if they are not known.
    """

    index: int
    name: str
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    rows: Callable[[], list[dict[str, Any]]]
    counted: Callable[[], dict[str, int]]
    by_query: Callable[[str], Array]
    entropy: Callable[[], Array]
    top: Callable[[int, int, int], tuple[Array, Array]]
    replay: Replay | None
    texts: Sequence[str] | None = None
    q_texts: Sequence[str] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """What the model panel shows.

    Attributes
    ----------
    title : str
    kind : "model", "arrays" or "capture"
    backend : str
        The backend that ran, or what is known of it.
    scores : tuple of str
        Names of the scores of each head.
    tokens : sequence of str or None
        Of the keys of batch row 0.
    layers : sequence of HeadLayer
    about : str
        What was read, in a sentence, where its name does not say it.
    """

    title: str
    kind: str
    backend: str
    scores: tuple[str, ...]
    tokens: Sequence[str] | None
    layers: Sequence[HeadLayer]
    about: str = ""

    def layer(self, index: int) -> HeadLayer:
        """One layer, by its number."""
        if not 0 <= index < len(self.layers):
            raise ArgumentError(
                f"layer {index} does not exist.", action=f"There are {len(self.layers)}."
            )
        return self.layers[index]

    def summary(self, levels: Callable[[HeadLayer], int]) -> dict[str, Any]:
        """The result of the method `model`."""
        tokens = None
        if self.tokens is not None:
            tokens = [shown(token) for token in self.tokens]
        return {
            "model": printable(self.title, 200),
            "backend": self.backend,
            "note": NOTE,
            "about": printable(self.about, 500),
            "kind": self.kind,
            "tokens": tokens,
            "scores": list(self.scores),
            "letters": {**LETTERS, NEXT: "N"},
            "meanings": {**MEANINGS, NEXT: "the token after"},
            "threshold": THRESHOLD,
            "layers": [
                {
                    "index": layer.index,
                    "name": printable(layer.name, 200),
                    "num_heads": layer.num_heads,
                    "num_kv_heads": layer.num_kv_heads,
                    "q_len": layer.q_len,
                    "kv_len": layer.kv_len,
                    "has_weights": layer.replay is not None,
                    "levels": levels(layer) if layer.replay is not None else 0,
                    "counted": layer.counted(),
                    **_own_tokens(layer),
                    "heads": [
                        {**row, "kv_head": row["head"] * layer.num_kv_heads // layer.num_heads}
                        for row in layer.rows()
                    ],
                }
                for layer in self.layers
            ],
        }


def shown(token: str) -> str:
    """A token for display: control characters escaped, and cut where it is long.

    Joiners stay as they are, because words of Persian and Hindi and many emoji are written with
    them. The page itself replaces those that join nothing.
    """
    parts = re.split("([\u200c\u200d])", token)
    parts[::2] = [printable(part, _LONGEST_TOKEN) for part in parts[::2]]
    whole = "".join(parts)
    return whole if len(whole) <= _LONGEST_TOKEN else whole[: _LONGEST_TOKEN - 3] + "..."


def heads_of_model(record: ModelRecord, about: str = "") -> Heads:
    """The layers of a model record, and a sentence about what the model read.

    Notes of the record come after it.

    Raises
    ------
    ArgumentError
        A layer has no head, or no batch row, of which the first is shown.
    """
    for layer in record:
        batch_size, num_heads, _ = layer.scores.received.shape
        if not batch_size or not num_heads:
            raise ArgumentError(
                f"there is no head of layer {layer.index} to show.",
                [("num_heads", str(num_heads)), ("batch_size", str(batch_size))],
                "Record arrays with a batch row and a head.",
            )
    layers = [
        _layer_of_model(layer, _texts(record, layer), query_texts(record, layer))
        for layer in record
    ]
    said = " ".join([*([about] if about else []), *record.sentences()])
    return Heads(record.model, "model", "qkv", SCORES, record.texts, layers, said)


def _own_tokens(layer: HeadLayer) -> dict[str, Any]:
    """The tokens of a layer that reads others than the rest, None if they are not known."""
    texts = {"tokens": layer.texts, "q_tokens": layer.q_texts}
    return {
        name: [shown(text) for text in own] or None
        for name, own in texts.items()
        if own is not None
    }


def _texts(record: ModelRecord, layer: LayerRecord) -> Sequence[str] | None:
    """The key tokens of a layer whose keys are not `record.texts`."""
    if layer.sequences[1] == "input_ids":
        return None
    return record.texts_of(layer.sequences[1]) or ()


def _layer_of_model(
    layer: LayerRecord, texts: Sequence[str] | None, q_texts: Sequence[str] | None
) -> HeadLayer:
    scores = layer.scores
    _, num_heads, q_len = scores.rows["entropy"].shape
    replay = None if scores.weights is None else scores.weights.replay
    num_kv_heads = num_heads if replay is None else replay.problem.spec.num_kv_heads

    def rows() -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k != "layer"} for row in layer.heads()]

    def top(head: int, first: int, stop: int) -> tuple[Array, Array]:
        chosen = (0, head, slice(first, stop))
        return scores.top_keys[chosen], scores.top_weights[chosen]

    def by_query(score: str) -> Array:
        return np.where(scores.counted[score][0], scores.rows[score][0], np.nan)

    return HeadLayer(
        layer.index,
        layer.name,
        num_heads,
        num_kv_heads,
        q_len,
        int(scores.received.shape[-1]),
        rows,
        lambda: {name: int(each.sum()) for name, each in scores.counted.items()},
        by_query,
        lambda: scores.rows["entropy"][0],
        top,
        replay,
        texts,
        q_texts,
    )


def heads_of_record(
    record: Record,
    title: str,
    tokens: Sequence[str] | None,
    about: str = "",
    is_placed: bool = True,
) -> Heads:
    """One record as a model of one layer, with the scores that need no pass over all pairs.

    Scores of keys at a distance are left out unless `is_placed`: it is known where queries stand.

    Raises
    ------
    ArgumentError
        The record has no batch row, or no head, or there is not one token for each key.
    """
    replay = record.weights.replay
    spec = replay.problem.spec
    require_names(tokens, spec.kv_len)
    shape = (spec.batch_size, spec.num_heads, spec.q_len)
    if 0 in shape[:2]:
        raise ArgumentError(
            "there is no head to show.",
            [("num_heads", str(spec.num_heads)), ("batch_size", str(spec.batch_size))],
            "Inspect arrays with a batch row and a head or more.",
        )
    entropy = np.asarray(record.entropy).reshape(shape)[0]
    scores: tuple[str, ...] = ("entropy", "max_weight", "sink")
    if is_placed:
        is_causal = any(isinstance(variant, Causal) for variant in record.variants)
        scores += ("previous", "own") if is_causal else ("previous", "own", NEXT)

    @cache
    def by_query() -> dict[str, Array]:
        by_name = {name: each.reshape(shape)[0] for name, each in record.rows_by_query().items()}
        sinks = replay.problem.operands.sinks
        lse = replay.lse.reshape(shape)[0]
        learned = 0 if sinks is None else shares_of_sinks(sinks[:, None], lse)
        return {**by_name, "sink": by_name["first"] + learned}

    def counted() -> dict[str, int]:
        return {name: int((by_query()[name] >= 0).any(axis=0).sum()) for name in scores}

    def rows() -> list[dict[str, Any]]:
        by_name = by_query()
        means = [
            {name: mean_of_known(by_name[name][head]) for name in scores}
            for head in range(spec.num_heads)
        ]
        kinds = [(*_kinds(row), None, None) for row in means]
        return [
            {"head": head, "kind": kinds[head][0], "also": kinds[head][1], **row}
            for head, row in enumerate(means)
        ]

    layer = HeadLayer(
        0,
        title,
        spec.num_heads,
        spec.num_kv_heads,
        spec.q_len,
        spec.kv_len,
        rows,
        counted,
        lambda score: by_query()[score],
        lambda: entropy,
        lambda head, first, stop: best_keys(replay, head, first, stop),
        replay,
    )
    non_finite = record.non_finite
    others = ["Means are those of the other rows."] if non_finite.rows.any() else []
    said = " ".join([*([about] if about else []), *non_finite.reasons, *others])
    return Heads(title, "arrays", record.backend, scores, tokens, [layer], said)


def _kinds(row: dict[str, float]) -> tuple[str, ...]:
    """The kinds of a head of arrays, the main one first."""
    kinds = kinds_of({**dict.fromkeys(KINDS, np.nan), **row})
    if row.get(NEXT, 0) >= THRESHOLD:
        kinds = tuple(sorted((*kinds, NEXT), key=lambda name: (name == "sink", -row[name])))
    return kinds


def best_keys(replay: Replay, head: int, first: int, stop: int) -> tuple[Array, Array]:
    """The best keys of some queries of batch row 0, from their weights alone."""
    kv_len = replay.problem.spec.kv_len
    count = min(_TOP, kv_len)
    indices = np.full((stop - first, count), -1, np.int64)
    best = np.zeros((stop - first, count), replay.dtype)
    step = max(1, _ROWS // max(kv_len, 1))
    for start in range(first, stop, step):
        rows = np.arange(start, min(start + step, stop))
        keys = replay.keys_seen(0, head, start, start + len(rows))
        weights = replay.whole_rows(0, head, rows, keys, exact=kv_len <= EXACT_KEYS)
        np.fmax(weights, 0, out=weights)  # NaN becomes 0.
        for place in range(min(count, len(keys))):
            # The first of equal weights, which is the lower key.
            found = weights.argmax(axis=1)[:, None]
            largest = np.take_along_axis(weights, found, axis=1)[:, 0]
            here = slice(start - first, start - first + len(rows)), place
            indices[here] = np.where(largest > 0, keys[found[:, 0]], -1)
            best[here] = np.minimum(largest, 1)
            np.put_along_axis(weights, found, 0, axis=1)
    return indices, best
