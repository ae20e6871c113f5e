"""One layer of a model, as the arrays that a command is given."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from qkv.arrays.views import view
from qkv.cli.inputs import InputArrays, checked_index
from qkv.cli.model_loading import inspect_model
from qkv.inspection.model_record import ModelRecord
from qkv.inspection.progress_bar import Bar
from qkv.inspection.summaries.terminal import Page

__all__ = ["model_layer"]


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
        # The record passes over what is no layer of the model.
        if len(record) > len(values):
            kept = wanted < 0 or wanted == len(values)
            values.append(np.array(view(value, "value")) if kept else None)

    with Bar(f"inspecting {Page().token(options.model, 40)}", passes=1) as bar:
        record = inspect_model(options, bar, "weights" if wanted < 0 else [wanted], see)
    layer = record[checked_index(wanted, len(record), "layer")]
    inputs = layer.scores.inputs
    assert inputs is not None  # the layer is one of those to keep
    texts = record.texts_of(layer.sequences[1])
    named = texts is not None and len(texts) == inputs.key.shape[-2]
    return InputArrays(
        inputs.query,
        inputs.key,
        values[layer.index].astype(inputs.query.dtype),
        tuple(texts) if texts is not None and named else None,
        f"{record.model}, layer {layer.index} of 0..{len(record) - 1}",
        record.model,
        inputs.variants,
        {name: option for name, option in inputs.options.items() if option is not None},
        notes=tuple(record.sentences()),
    )
