"""One layer of a model, as the arrays that a command is given."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np

from qkv.arrays.views import view
from qkv.cli.inputs.arrays import InputArrays, checked_index
from qkv.cli.inputs.model import inspect_model
from qkv.errors import ArgumentError
from qkv.files.contents import shown
from qkv.inspection.models.layer_texts import query_texts
from qkv.inspection.models.model_record import LayerRecord, ModelRecord
from qkv.inspection.rendering.progress_bar import Bar
from qkv.inspection.summaries.terminal import Page

__all__ = ["model_layer", "saved_layer"]


def model_layer(options: argparse.Namespace) -> InputArrays:
    """Query, key, value and variants of the layer of `--layer`, on the text of `--text`.

    Raises
    ------
    QkvError
        The model or the text cannot be used, or there is no such layer; the message says why.
    """
    wanted: int = options.layer
    values: list[Any] = []

    def see(record: ModelRecord, value: Any) -> None:
        # The record leaves out modules that are not layers of the model.
        if len(record) > len(values):
            kept = wanted < 0 or wanted == len(values)
            values.append(np.array(view(value, "value")) if kept else None)

    with Bar(f"inspecting {Page().token(options.model, 40)}", passes=1) as bar:
        record = inspect_model(options, bar, "weights" if wanted < 0 else [wanted], see)
    layer = record[checked_index(wanted, len(record), "layer")]
    inputs = layer.scores.inputs
    assert inputs is not None  # The layer is one of those to keep.
    return InputArrays(
        inputs.query,
        inputs.key,
        values[layer.index].astype(inputs.query.dtype),
        _tokens(record, layer),
        _title(record, layer),
        record.model,
        inputs.variants,
        {name: option for name, option in inputs.options.items() if option is not None},
        notes=tuple(record.sentences()),
        q_tokens=query_texts(record, layer),
    )


def saved_layer(record: ModelRecord, options: argparse.Namespace) -> InputArrays:
    """The same of a record that was saved, from `--batch` on; it has no values.

    Raises
    ------
    ArgumentError
        There is no such layer, or it was not kept.
    """
    layer = record[checked_index(options.layer, len(record), "layer")]
    inputs = layer.scores.inputs
    if inputs is None:
        raise ArgumentError(
            f"{shown(options.file)} has the scores of layer {layer.index}, and not its query and "
            "key, from which weights are computed.",
            action=f'Record it with keep="weights" or keep=[{layer.index}] before it is saved, or '
            f"with qkv inspect --model NAME --layer {layer.index} --save FILE.",
        )
    return replace(
        InputArrays.of_record(inputs.inspected(), options.file),
        tokens=None if options.batch else _tokens(record, layer),
        title=_title(record, layer),
        notes=tuple(record.sentences()),
        q_tokens=query_texts(record, layer),
    )


def _tokens(record: ModelRecord, layer: LayerRecord) -> tuple[str, ...] | None:
    """The texts of the keys in batch row 0, if they are known."""
    texts = record.texts_of(layer.sequences[1])
    return None if texts is None or len(texts) != layer.received.shape[-1] else tuple(texts)


def _title(record: ModelRecord, layer: LayerRecord) -> str:
    return f"{record.model}, layer {layer.index} of 0..{len(record) - 1}"
