"""What a model is called with for a text: its tokens, and those that its decoder begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qkv.arguments.declarations import is_integer, shown
from qkv.errors import ArgumentError

__all__ = ["inputs_of_text"]


def inputs_of_text(
    model: torch.nn.Module,
    text: str | Sequence[str],
    tokenizer: Any,
    decoder_text: str | None = None,
) -> dict[str, Any]:
    """The inputs of a model for a text, or for several as one batch.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    text : str, or a sequence of str
    tokenizer : transformers tokenizer
    decoder_text : str, optional
        What the decoder reads after its start token; nothing unless given.

    Raises
    ------
    ArgumentError
        There is no text, one of several has no tokens, there is no start token of the decoder, or
        texts of several lengths cannot be padded.
    """
    inputs = dict(tokenizer(_texts(text), return_tensors="pt", **_padding(text, tokenizer)))
    real = inputs.get("attention_mask")
    if real is not None and len(real) > 1 and not real.any(dim=1).all():
        first = int(real.any(dim=1).logical_not().nonzero()[0])
        raise ArgumentError(f"text {first} of {len(real)} has no tokens.", action="Leave it out.")
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        start = torch.tensor([[_start_token(model)]])
        if decoder_text:
            answer = tokenizer(
                text_target=decoder_text, add_special_tokens=False, return_tensors="pt"
            )
            start = torch.cat([start, answer["input_ids"].to(start.dtype)], dim=1)
        inputs["decoder_input_ids"] = start.expand(len(inputs["input_ids"]), -1)
    elif decoder_text is not None:
        raise ArgumentError(
            f"{type(model).__name__} has no decoder beside an encoder to read decoder_text.",
            action="Leave decoder_text out.",
        )
    return inputs


def _texts(text: Any) -> str | list[str]:
    if isinstance(text, str):
        return text
    if not isinstance(text, list | tuple) or not all(isinstance(each, str) for each in text):
        raise ArgumentError(
            f"text={shown(text)} is not text.", action="Pass a str, or a list of them."
        )
    if not text:
        raise ArgumentError("there are 0 texts.", action="Pass a sentence.")
    return list(text)


def _padding(text: Any, tokenizer: Any) -> dict[str, bool]:
    """How to make texts of several lengths one batch."""
    if isinstance(text, str) or len(text) == 1:
        return {}
    if getattr(tokenizer, "pad_token", None) is not None:
        return {"padding": True}
    lengths = [len(ids) for ids in tokenizer(list(text))["input_ids"]]
    if len(set(lengths)) == 1:
        return {}
    raise ArgumentError(
        f"{len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens are not a batch, and the "
        "tokenizer has no pad_token.",
        action="Set tokenizer.pad_token = tokenizer.eos_token, or inspect one text at a time.",
    )


def _start_token(model: Any) -> int:
    """The token that a decoder begins with, where `generate` of transformers looks for it."""
    for name in ("decoder_start_token_id", "bos_token_id"):
        for config in (getattr(model, "generation_config", None), model.config):
            token = getattr(config, name, None)
            if is_integer(token):
                return token
    raise ArgumentError(
        f"{type(model).__name__} has an encoder and a decoder, and its configuration names no "
        "decoder_start_token_id.",
        action="Set model.config.decoder_start_token_id, or call the model yourself: with "
        "qkv.hf.inspect(model) as record: model(**inputs, decoder_input_ids=...).",
    )
