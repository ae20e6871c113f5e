"""The config of an encoder and a decoder as two, each with the usual names of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkv.arguments.declarations import shown
from qkv.errors import ArgumentError, UnsupportedError

__all__ = ["ENCODER_DECODERS", "encoder_and_decoder"]

ENCODER_DECODERS = ("t5", "mt5", "bart", "mbart", "whisper")
"""Each `model_type` that is counted; families.json has a row for its decoder and its encoder."""


_FEED_FORWARD = {"t5": "relu", "mt5": "gated-gelu"}
"""What transformers takes for a `feed_forward_proj` that is left out."""


def encoder_and_decoder(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the encoder and of the decoder.

    Parameters
    ----------
    fields : mapping
        A config with `is_encoder_decoder`.

    Raises
    ------
    ArgumentError
        A field is missing.
    UnsupportedError
        The `model_type` is not one of `ENCODER_DECODERS`.

    Examples
    --------
    >>> encoder, decoder = encoder_and_decoder({
    ...     "model_type": "t5", "num_layers": 6, "num_decoder_layers": 8, "d_ff": 2048, "d_kv": 64,
    ...     "feed_forward_proj": "gated-gelu"})
    >>> encoder["num_hidden_layers"], decoder["num_hidden_layers"], decoder["gated_mlp"]
    (6, 8, True)
    """
    kind = fields.get("model_type")
    if kind not in ENCODER_DECODERS:
        raise UnsupportedError(
            f"a model of an encoder and a decoder with model_type {shown(kind)} is not counted.",
            action=f"Those with {', '.join(ENCODER_DECODERS)} are.",
        )
    shared = {name: value for name, value in fields.items() if name != "num_hidden_layers"}
    if kind in ("t5", "mt5"):
        return _t5(shared)
    sides = []
    for side in ("encoder", "decoder"):
        own = {
            "num_hidden_layers": f"{side}_layers",
            "num_attention_heads": f"{side}_attention_heads",
            "intermediate_size": f"{side}_ffn_dim",
        }
        if kind == "whisper":
            reads = "source" if side == "encoder" else "target"
            own["max_position_embeddings"] = f"max_{reads}_positions"
        sides.append(shared | {usual: _field(fields, name) for usual, name in own.items()})
    return sides[0], sides[1]


def _t5(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    activation = str(fields.get("feed_forward_proj", _FEED_FORWARD[fields["model_type"]]))
    usual = fields | {
        "intermediate_size": _field(fields, "d_ff"),
        "head_dim": _field(fields, "d_kv"),
        "gated_mlp": activation.startswith("gated-"),
        "activation_function": activation.removeprefix("gated-"),
        "max_position_embeddings": fields.get("n_positions") or 512,
    }
    layers = _field(fields, "num_layers")
    decoder_layers = fields.get("num_decoder_layers") or layers
    return usual | {"num_hidden_layers": layers}, usual | {"num_hidden_layers": decoder_layers}


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise ArgumentError(
            f"the config has no {name}.",
            [("model_type", repr(fields.get("model_type"))[:40])],
            "Pass the config.json of the whole model.",
        )
    return fields[name]
