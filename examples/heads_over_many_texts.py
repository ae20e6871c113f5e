"""Scores of the heads of a model over many texts, which processes share, with their confidence.

    torchrun --nproc-per-node 2 examples/heads_over_many_texts.py FOLDER [TEXT [MODEL]]

The paragraphs of the file TEXT are the texts; without it, those of this project's README. MODEL is
a folder of a causal model of transformers with its tokenizer; without it, a small one with random
weights reads bytes. Stop it in the middle and start it anew, with as many processes as you like:
what FOLDER holds is not computed again, and the numbers are the same to the last bit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import qkv
import qkv.hf
from qkv.inspection.models.corpus import CorpusRecord

README = Path(__file__).parents[1] / "README.md"


def bytes_as_ids(text: str, return_tensors: str) -> dict[str, torch.Tensor]:
    """What a tokenizer gives, with a token for each byte."""
    return {"input_ids": torch.tensor([[*text.encode()]])}


def model_of(name: str | None) -> tuple[torch.nn.Module, Callable[..., Any]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaModel

    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, local_files_only=True)
        return model.eval(), AutoTokenizer.from_pretrained(name, local_files_only=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaModel(config).eval(), bytes_as_ids


def main(
    folder: str, text: str | None = None, model: str | None = None, most: int | None = None
) -> CorpusRecord:
    """The scores, on every process; of the first `most` paragraphs if it is given."""
    paragraphs = [part for part in Path(text or README).read_text().split("\n\n") if part.strip()]
    network, tokenizer = model_of(model)
    corpus = qkv.hf.inspect_corpus(network, paragraphs[:most], folder, tokenizer=tokenizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{corpus.texts} texts, mean and half the width of its 95 % interval")
        for row in corpus.rows():
            cells = (f"{s} {row[s]:.3f} +- {row[f'{s}_within']:.3f}" for s in ("previous", "sink"))
            print(f"layer {row['layer']} head {row['head']}", *cells, sep="   ")
    return corpus


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)  # Bits of torch's products may depend on it.
    qkv.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    main(*sys.argv[1:])
    if dist.is_initialized():
        dist.destroy_process_group()
