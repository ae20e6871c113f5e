"""A model record as a file: safetensors, names in its metadata as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import checked_integer
from qkv.files.described import read_described, schema_of, write_described
from qkv.inspection.heads.head_scores import SCORES, HeadScores
from qkv.inspection.heads.kept_inputs import KeptInputs

__all__ = ["RecordFields", "is_model_record", "load", "save"]

Array = NDArray[Any]

SCHEMA, VERSION = "qkv-model-record", 2
"""Version 2 has what the weights of kept layers come from; files of version 1 are read too."""


class RecordFields(NamedTuple):
    """What a file holds of a `ModelRecord`: its fields, and three of each layer's."""

    model: str
    tokens: Array | None
    texts: Sequence[str] | None
    decoder_texts: Sequence[str] | None
    layers: Sequence[tuple[str, HeadScores, tuple[str | None, str | None]]]
    unknown_id: int | None = None
    notes: Sequence[str] = ()


def save(record: RecordFields, path: str | os.PathLike[str]) -> None:
    """Write a record; see `ModelRecord.save`."""
    arrays = {} if record.tokens is None else {"tokens": record.tokens.astype(np.int64)}
    kept = {}
    for index, (_, scores, _) in enumerate(record.layers):
        prefix = _prefix(index)
        arrays.update(_layer_arrays(scores, prefix))
        if scores.inputs is not None and scores.weights is not None:
            kept[str(index)] = scores.inputs.to_data(arrays, prefix)
            arrays[f"{prefix}.lse"] = scores.weights.replay.lse
    unknown_id = record.unknown_id
    about = {
        "model": record.model,
        "texts": None if record.texts is None else list(record.texts),
        "decoder_texts": None if record.decoder_texts is None else list(record.decoder_texts),
        "layers": [name for name, _, _ in record.layers],
        "sequences": [sequences for _, _, sequences in record.layers],
        "kept": kept,
        "unknown_id": None if unknown_id is None else checked_integer("unknown_id", unknown_id),
        "notes": list(record.notes),
    }
    write_described(path, SCHEMA, VERSION, about, arrays)


def load(path: str | os.PathLike[str]) -> RecordFields:
    """Read a record; see `qkv.inspection.models.model_record.load`."""
    return read_described(path, SCHEMA, VERSION, "record of a model", _record)


def is_model_record(path: str | os.PathLike[str]) -> bool:
    """Whether a file says of itself that it is a record of a model; False if it cannot be read."""
    return schema_of(path) == SCHEMA


def _layer_arrays(scores: HeadScores, prefix: str) -> dict[str, Array]:
    return {
        **{f"{prefix}.rows.{name}": scores.rows[name] for name in SCORES},
        **{f"{prefix}.counted.{name}": scores.counted[name] for name in SCORES},
        f"{prefix}.received": scores.received,
        f"{prefix}.top_keys": scores.top_keys,
        f"{prefix}.top_weights": scores.top_weights,
    }


def _record(header: dict[str, Any], arrays: dict[str, Array]) -> RecordFields:
    names = header["layers"]
    # Files of earlier versions say nothing of a second sequence.
    sequences = header.get("sequences") or [("input_ids", "input_ids")] * len(names)
    layers = zip(names, _layers(len(names), header.get("kept", {}), arrays), sequences, strict=True)
    return RecordFields(
        str(header["model"]),
        arrays.get("tokens"),
        _texts(header["texts"]),
        _texts(header.get("decoder_texts")),
        [(str(name), scores, (_name(q), _name(kv))) for name, scores, (q, kv) in layers],
        None if (unknown_id := header.get("unknown_id")) is None else int(unknown_id),
        [str(note) for note in header.get("notes", ())],
    )


def _texts(given: list[Any] | None) -> list[str] | None:
    return None if given is None else [str(text) for text in given]


def _name(given: Any) -> str | None:
    return None if given is None else str(given)


def _layers(count: int, kept: dict[str, Any], arrays: dict[str, Array]) -> Iterator[HeadScores]:
    for index in range(count):
        prefix = _prefix(index)
        rows = {score: arrays[f"{prefix}.rows.{score}"] for score in SCORES}
        counted = {score: arrays[f"{prefix}.counted.{score}"] for score in SCORES}
        received, keys, best = (
            arrays[f"{prefix}.{part}"] for part in ("received", "top_keys", "top_weights")
        )
        batch, num_heads, q_len = rows["entropy"].shape
        fits = (
            all(row.shape == (batch, num_heads, q_len) for row in rows.values())
            and all(c.shape == (batch, q_len) and c.dtype == bool for c in counted.values())
            and received.shape[:-1] == (batch, num_heads)
            and keys.shape == best.shape
            and keys.shape[:-1] == (batch, num_heads, q_len)
        )
        if not fits:
            raise ValueError(f"the shapes of layer {index} do not fit each other")
        inputs = weights = None
        if str(index) in kept:
            inputs = KeptInputs.from_data(kept[str(index)], arrays, prefix)
            weights = inputs.weights(arrays[f"{prefix}.lse"])
            if weights.shape != (batch, num_heads, q_len, received.shape[-1]):
                raise ValueError(f"the weights of layer {index} do not fit its scores")
        yield HeadScores(rows, counted, received, keys, best, weights, inputs)


def _prefix(index: int) -> str:
    """How the names of a layer's arrays begin."""
    return f"layers.{index}"
