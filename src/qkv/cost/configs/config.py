"""A model from its `config.json`, as Hugging Face writes it, without transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkv.arguments.declarations import checked, shown
from qkv.cost.configs.encoder_decoder import ENCODER_DECODERS, encoder_and_decoder
from qkv.cost.configs.families import (
    ACTIVATION,
    CHOSEN,
    CONTEXT,
    EMBED_WIDTH,
    EXPERTS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    WIDTH,
    WINDOW,
    families,
    left_out,
)
from qkv.cost.configs.fields import Fields
from qkv.cost.configs.unlike_llama import unlike_llama
from qkv.cost.model import Attention, FeedForward, Latent, Layer, Model, Norm
from qkv.errors import ArgumentError, FileError, UnsupportedError

__all__ = ["read_config"]

_LARGEST = 2**24
"""Bytes of the largest file that is read; real ones have a few thousand."""
_NAME_A_CONFIG = "Name the config.json of a model, or its folder."
_MOST_LAYERS = 10_000
"""The most layers: each takes some 100 microseconds."""
_GLOBAL_EVERY = ("sliding_window_pattern", "global_attn_every_n_layers")


@checked
def read_config(
    config: str | os.PathLike[str] | Mapping[str, Any], *, name: str = "", source: str = ""
) -> Model:
    """The model that a Hugging Face `config.json` describes.

    Parameters
    ----------
    config : path or mapping
        The file, its folder, or what it holds.
    name : str
        What to call it; by default what the config calls itself.
    source : str
        Where it comes from.

    Returns
    -------
    Model
        With a note for whatever is assumed, such as a `model_type` that is not known.

    Raises
    ------
    FileError
        If the file cannot be read or holds no JSON object.
    ArgumentError
        If a field is missing or has a value that no model can have.
    UnsupportedError
        If the model has layers that are not attention, or an encoder and a decoder of a
        `model_type` that is not known.

    Examples
    --------
    >>> from qkv.cost import read_config
    >>> model = read_config({
    ...     "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    ...     "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000,
    ... })
    >>> model.layers[0].attention.head_dim
    128
    """
    path = None if isinstance(config, Mapping) else Path(config)
    fields: Mapping[str, Any] = config if isinstance(config, Mapping) else _contents(Path(config))
    notes = []
    if isinstance(text := fields.get("text_config"), Mapping):
        tied = fields.get("tie_word_embeddings")  # of the whole model, which has the output head
        fields = text if tied is None else {**text, "tie_word_embeddings": tied}
        notes.append("only the text model is counted")
    elif "vision_config" in fields:
        notes.append("only the text model is counted")
    kind = str(fields.get("model_type", ""))
    encoder = None
    if fields.get("is_encoder_decoder", kind in ENCODER_DECODERS):
        reads, fields = encoder_and_decoder(fields)
        given = Fields(reads, families()[f"{kind} encoder"])
        encoder = _model(given, f"{kind} encoder", source, [])
        if given.flag("audio"):
            notes.append("of the convolutions before the encoder only the parameters are counted")
    if kind not in families():
        notes.append(f"model_type {shown(kind)} is not known; counted as llama")
        notes += unlike_llama(fields)
    given = Fields(fields, families().get(kind, families()["llama"]), left_out(fields, kind))
    called = name or str(fields.get("_name_or_path") or (path.name if path else "") or kind)
    model = _model(given, called, source, notes)
    if unread := given.unread():
        notes.append(unread)
    if given.flag("cross") and encoder is None:
        notes.append("of attention to another sequence only the parameters are counted")
    if given.assumed:
        taken = ", ".join(f"{field} {value}" for field, value in given.assumed.items())
        notes.append(f"left out, so as in transformers: {taken}")
    return replace(model, encoder=encoder, notes=tuple(notes))


def _contents(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        with file.open("rb") as opened:
            raw = opened.read(_LARGEST + 1)
    except OSError as error:
        raise FileError(
            f"{shown(str(file), 200)} cannot be read: {error.strerror or error}.",
            action=_NAME_A_CONFIG,
        ) from error
    if len(raw) > _LARGEST:
        raise FileError(
            f"{shown(str(file), 200)} is larger than {_LARGEST} bytes; no config is.",
            action=_NAME_A_CONFIG,
        )
    try:
        contents = json.loads(raw)
    except (ValueError, RecursionError) as error:
        reason = [("reason", f"{error!s:.100}")]
        raise FileError(f"{shown(str(file), 200)} is not JSON.", reason, _NAME_A_CONFIG) from error
    if not isinstance(contents, dict):
        raise FileError(f"{shown(str(file), 200)} holds no JSON object.", action=_NAME_A_CONFIG)
    return contents


def _model(given: Fields, name: str, source: str, notes: list[str]) -> Model:
    width, count = given.size(WIDTH), given.size(LAYERS, most=_MOST_LAYERS)
    vocabulary = (
        given.size("vocab_size")
        if given.flag("tokens") and not given.flag("patches") and not given.flag("attention_only")
        else 0
    )
    norm = Norm(given.flag("centred"), given.flag("norm_weight"), given.flag("norm_bias"))
    layers = tuple(_layer(given, width, index, count) for index in range(count))
    correction = given.family["expert_correction"]
    routed = sum(1 for layer in layers if layer.feed_forward and layer.feed_forward.experts)
    embed_width = given.size(EMBED_WIDTH, width) if given.flag("narrow") else None
    of_tables = (embed_width or width) if given.flag("narrow_tables") else width
    tables = _tables(given, of_tables, norm)
    if correction and routed:
        tables["expert correction"] = routed * given.size(EXPERTS)
    return Model(
        name=name,
        width=width,
        layers=layers,
        norm=norm,
        vocab_size=vocabulary,
        tied=bool(given.fields.get("tie_word_embeddings", given.family["tied"])),
        head=given.flag("head"),
        tables=tables,
        final_norm=given.flag("final_norm") and not given.fields.get("_remove_final_layer_norm"),
        embed_width=embed_width,
        embed_bias=given.flag("narrow_tables"),
        context=_patches(given) if given.flag("patches") else given.size(CONTEXT, default=2048),
        source=source,
        notes=tuple(notes),
    )


def _tables(given: Fields, width: int, norm: Norm) -> dict[str, int]:
    """Learned numbers outside the layers, the token table and the last norm."""
    tables: dict[str, int] = {}
    extra = given.family["positions"]
    if extra is not None:
        tables["positions"] = (given.size(CONTEXT) + extra) * width
    if given.flag("token_types"):
        tables["token types"] = given.size("type_vocab_size", default=2) * width
    if given.flag("embedding_norm"):
        tables["embedding norm"] = norm.parameters(width)
    if given.flag("relative_bias"):
        buckets = given.size("relative_attention_num_buckets", default=32)
        tables["relative bias"] = buckets * given.size(HEADS)
    if given.flag("audio"):
        mels, kernel = given.size("num_mel_bins"), 3
        tables["convolutions"] = (kernel * (mels + width) + 2) * width
    if given.flag("head_bias"):
        tables["head bias"] = given.size("vocab_size")
    if given.flag("pooler"):
        tables["pooler"] = width * width + width
    if given.flag("patches"):
        side = given.size("patch_size", default=16)
        patch = given.size("num_channels", default=3) * side**2
        tables["patch projection"] = (patch + 1) * width
        tables["class token"] = width
        tables["positions"] = _patches(given) * width
        labels = given.fields.get("id2label")
        if isinstance(labels, Mapping):
            tables["classifier"] = (width + 1) * len(labels)
    return tables


def _patches(given: Fields) -> int:
    """Patches of an image, and the class token."""
    along = given.size("image_size", default=224) // given.size("patch_size", default=16)
    return along * along + 1


def _layer(given: Fields, width: int, index: int, count: int) -> Layer:
    attention = _attention(given, width, index, count)
    if given.flag("attention_only"):
        return Layer(attention, None, int(attention.projections))
    cross = replace(attention, causal=False) if given.flag("cross") else None
    return Layer(attention, _feed_forward(given, width, index), _norms(given, index), cross)


def _norms(given: Fields, index: int) -> int:
    """Norms of a layer; Falcon has one where attention and feed-forward read the same rows."""
    norms = given.family["norms"]
    if given.flag("one_norm"):
        return 1
    if norms != "falcon":
        is_left_out = index == 0 and not given.flag("first_norm")
        return int(norms) + given.flag("cross") - is_left_out
    are_apart = given.fields.get("new_decoder_architecture")
    if given.fields.get("num_ln_in_parallel_attn") is not None:
        are_apart = given.size("num_ln_in_parallel_attn") == 2
    return 1 if given.fields.get("parallel_attn") and not are_apart else 2


def _kv_heads(given: Fields, heads: int) -> int:
    """Key and value heads; Falcon says them in three fields, of which the first that holds counts.

    Elsewhere `multi_query` means one head, unless a number of heads is stated beside it.
    """
    stated = given.size(KV_HEADS, default=heads)
    if given.family["heads"] == "falcon":
        if given.fields.get("new_decoder_architecture"):
            return stated
        return 1 if given.fields.get("multi_query") else heads
    beside = any(name in given.fields for name in KV_HEADS)
    return 1 if given.fields.get("multi_query") and not beside else stated


def _attention(given: Fields, width: int, index: int, count: int) -> Attention:
    fields = given.fields
    heads = given.size(HEADS)
    kv_heads = _kv_heads(given, heads)
    if heads % kv_heads:
        raise ArgumentError(
            f"{kv_heads} key and value heads do not divide {heads} heads in the config.",
            action=f"Write a number of key and value heads that divides {heads} into it.",
        )
    shared: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "causal": given.flag("causal"),
        "window": _window(given, index, count),
        "qkv_bias": given.flag("qkv_bias"),
        "out_bias": given.flag("out_bias"),
        "qk_norm": given.family["qk_norm"] if given.flag("has_qk_norm") else "",
        "norm_of_qk": Norm(given.flag("centred"), bias=given.family["qk_norm_bias"]),
        "key_bias": given.flag("key_bias"),
        "relative_bias": given.flag("relative_bias"),
        "scaled": given.flag("scaled"),
        "sinks": given.flag("sinks"),
    }
    if fields.get("kv_lora_rank") is not None:
        rope_dim = given.size("qk_rope_head_dim")
        latent = Latent(given.size("q_lora_rank", default=0), given.size("kv_lora_rank"), rope_dim)
        return Attention(
            head_dim=given.size("qk_nope_head_dim") + rope_dim,
            v_head_dim=given.size("v_head_dim"),
            latent=latent,
            rope_dim=rope_dim,
            **shared,
        )
    if fields.get("head_dim") is None and width % heads:
        raise ArgumentError(
            f"{heads} heads do not divide a width of {width} in the config.",
            action="Write head_dim into it, or a number of heads that divides the width.",
        )
    head_dim = given.size("head_dim", default=width // heads)
    return Attention(
        head_dim=head_dim,
        v_head_dim=head_dim,
        rope_dim=_rope_dim(given, head_dim),
        projections=bool(fields.get("projections", True)),
        gate=bool(fields.get("gate", False)),
        pair_width=given.size("pair_width", default=0),
        **shared,
    )


def _rope_dim(given: Fields, head_dim: int) -> int:
    if not given.flag("rotary") or given.flag("no_rotary"):
        return 0
    rope = given.fields.get("rope_parameters")
    nested = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
    share = nested or given.fields.get("partial_rotary_factor") or given.fields.get("rotary_pct")
    return int(head_dim * share) if isinstance(share, int | float) and 0 <= share <= 1 else head_dim


def _window(given: Fields, index: int, count: int) -> int | None:
    """The window of one layer, by the config's list of layers or by the family's habit."""
    fields = given.fields
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        kind = kinds[index] if index < len(kinds) == count else None
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedError(
                f"layer {index} is {shown(kind)} in the config's layer_types.",
                [("layers", f"{count}, of which {len(kinds)} have a type")],
                "Only full_attention and sliding_attention are counted.",
            )
        return given.size(WINDOW) if kind == "sliding_attention" else None
    if (
        all(fields.get(name) is None for name in WINDOW)
        or fields.get("use_sliding_window") is False
    ):
        return None
    if isinstance(pattern := fields.get("sliding_window_pattern"), str):
        every = len(pattern)  # of Exaone 4, such as "LLLG"
    else:
        every = given.size(_GLOBAL_EVERY, default=given.family["global_every"], least=0)
    place = index if given.flag("global_first") else index + 1
    if every and place % every == 0:
        return None
    if fields.get("use_sliding_window") and index < given.size("max_window_layers", 0, 0):
        return None
    return given.size(WINDOW)


def _feed_forward(given: Fields, width: int, index: int) -> FeedForward:
    activation = next((given.fields[n] for n in ACTIVATION if given.fields.get(n)), None)
    shape: dict[str, Any] = {
        "activation": _activation(activation or given.family["activation"]),
        "gated": given.flag("gated"),
        "bias": given.flag("mlp_bias"),
    }
    dense = FeedForward(given.size(HIDDEN, default=4 * width), **shape)
    experts = given.size(EXPERTS, default=0, least=0)
    if not experts or not _routed(given, index):
        return dense
    chosen = given.size(CHOSEN)
    if chosen > experts:
        raise ArgumentError(
            f"{chosen} experts for each token, of {experts}, in the config.",
            action=f"Write at most {experts} experts for each token into it.",
        )
    hidden = given.size("moe_intermediate_size", default=dense.width)
    shared = given.size("n_shared_experts", default=0, least=0) * hidden
    return FeedForward(
        hidden,
        experts=experts,
        experts_per_token=chosen,
        shared_width=given.size("shared_expert_intermediate_size", default=shared, least=0),
        router_bias=given.flag("router_bias"),
        shared_gate=given.flag("shared_gate"),
        **shape,
    )


def _routed(given: Fields, index: int) -> bool:
    """Whether a layer of a model with experts has them."""
    only = given.fields.get("mlp_only_layers") or ()
    step = given.size("decoder_sparse_step", default=1)
    first = given.size("first_k_dense_replace", default=0, least=0)
    return index >= first and index not in only and (index + 1) % step == 0


def _activation(name: Any) -> str:
    text = str(name).lower()
    for known, words in {"gelu": ("gelu",), "silu": ("silu", "swish"), "relu": ("relu",)}.items():
        if any(word in text for word in words):
            return known
    raise UnsupportedError(
        f"the config's activation {shown(name)} is not counted.",
        action="gelu, silu, swish and relu are.",
    )
