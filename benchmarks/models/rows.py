"""Which models run, and what they do: small configurations with random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.problems.named import named

__all__ = ["ROWS", "Model", "Row", "choose", "row_of"]


@dataclass(frozen=True)
class Model:
    """A configuration of transformers.

    Attributes
    ----------
    model, config : str
        Classes of transformers.
    settings : mapping
        Of the configuration.
    other : str
        The implementation of attention that qkv is held against: "eager" where there is no
        "sdpa", as for sinks.
    """

    model: str
    config: str
    settings: Mapping[str, Any]
    other: str = "sdpa"


_DECODER = {
    "vocab_size": 2000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_LLAMA = Model("LlamaForCausalLM", "LlamaConfig", _DECODER)
_MISTRAL = Model("MistralForCausalLM", "MistralConfig", {**_DECODER, "sliding_window": 256})
_GPT_OSS = Model(
    "GptOssForCausalLM",
    "GptOssConfig",
    {
        **_DECODER,
        "intermediate_size": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "eager",
)
_BERT = Model(
    "BertModel",
    "BertConfig",
    {
        "vocab_size": 2000,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
    },
)
_T5 = Model(
    "T5ForConditionalGeneration",
    "T5Config",
    {
        "vocab_size": 2000,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 1024,
        "num_layers": 4,
        "num_heads": 8,
        "decoder_start_token_id": 0,
        "eos_token_id": None,
    },
)


@dataclass(frozen=True)
class Row:
    """A model and what it does.

    Attributes
    ----------
    name : str
    model : Model
    does : "forward", "generate" or "train"
        One forward pass; `new` tokens after the prompt; or forward and backward.
    batch, length : int
        Of the tokens that are given.
    new : int
        Tokens to generate.
    padded : bool
        Whether rows after the first are padded on the left, the last by half.
    static : bool
        Whether the cache is static.
    """

    name: str
    model: Model
    does: Literal["forward", "generate", "train"]
    batch: int
    length: int
    new: int = 0
    padded: bool = False
    static: bool = False


ROWS: tuple[Row, ...] = (
    Row("encode-8x128", _BERT, "forward", 8, 128),
    Row("encode-4x512", _BERT, "forward", 4, 512),
    Row("encode-4x512-padded", _BERT, "forward", 4, 512, padded=True),
    Row("prefill-1024", _LLAMA, "forward", 1, 1024),
    Row("prefill-4096", _LLAMA, "forward", 1, 4096),
    Row("prefill-1024-window", _MISTRAL, "forward", 1, 1024),
    Row("prefill-1024-sinks", _GPT_OSS, "forward", 1, 1024),
    Row("generate-64", _LLAMA, "generate", 1, 64, 64),
    Row("generate-512", _LLAMA, "generate", 1, 512, 64),
    Row("generate-4096", _LLAMA, "generate", 1, 4096, 64),
    Row("generate-512-static", _LLAMA, "generate", 1, 512, 64, static=True),
    Row("generate-512-padded", _LLAMA, "generate", 4, 512, 64, padded=True),
    Row("generate-512-window", _MISTRAL, "generate", 1, 512, 64),
    Row("generate-512-sinks", _GPT_OSS, "generate", 1, 512, 64),
    Row("generate-512-t5", _T5, "generate", 1, 512, 64),
    Row("train-4x256", _LLAMA, "train", 4, 256),
)


def choose(names: Sequence[str]) -> tuple[Row, ...]:
    """The rows of these names or beginnings of names; all if there are none.

    Raises
    ------
    ArgumentError
        If nothing has such a name.
    """
    return named(ROWS, names, "model") if names else ROWS


def row_of(name: str) -> Row:
    """The row of exactly this name."""
    return next(row for row in ROWS if row.name == name)
