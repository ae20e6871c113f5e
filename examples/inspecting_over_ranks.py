"""Look into every head of a model on a sequence that is spread over processes.

    torchrun --nproc-per-node 2 examples/inspecting_over_ranks.py [LENGTH]

No process holds the keys of all rows, nor a matrix of weights. The table of heads is that of one
process to rounding; it is the same on every process. The model is a small one of transformers with
random weights, so that its heads do nothing in particular; the second half of the sequence repeats
the first.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import qkv
import qkv.hf
from qkv.distributed import Order


def small_model() -> Any:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaModel(config).eval()


def main(length: int = 2048) -> list[dict[str, Any]]:
    """A row for each head; to be called in all processes of a group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = small_model()
    half = torch.randint(256, (1, length // 2), generator=torch.Generator().manual_seed(0))
    order = Order.zigzag(2 * half.shape[1], ranks)  # The last rows see most keys.
    own = order.shard(torch.cat([half, half], 1), rank, axis=-1)
    with torch.no_grad(), qkv.hf.sharded(model, order=order), qkv.hf.inspect(model) as record:
        model(own)
    print(f"process {rank} of {ranks} holds {own.shape[1]} of {order.length} rows", flush=True)
    if rank == 0:
        print(record.summary())
    return record.rows()


if __name__ == "__main__":
    torch.set_num_threads(1)
    qkv.set_num_threads(1)
    if "RANK" not in os.environ:  # Without torchrun, a group of one, at any port that is free.
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    main(*map(int, sys.argv[1:]))
    dist.destroy_process_group()
