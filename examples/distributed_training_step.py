"""Train a small causal transformer on sequences that are spread over processes.

Every process holds its own rows of each sequence. Attention sends keys around, everything else is
row by row; gradients of parameters are added up over the processes.

    torchrun --nproc-per-node 2 examples/distributed_training_step.py

prints the losses of a run on one process, which are those of the run without torchrun to rounding.
The last third of every row repeats the first, which the model learns to look up.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import qkv
from qkv.distributed import Order, attention, balanced

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 16, 96, 64, 4, 2, 16


class Layer(nn.Module):
    """Attention over all rows of the sequence, then two linear layers of the own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, order: Order) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        found = attention(q, k, v, qkv.Causal(), qkv.RoPE(), order=order)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.rest(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, order: Order) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, order)
        return self.head(x)


def sequences(generator: torch.Generator) -> Tensor:
    third, middle = torch.randint(VOCABULARY, (2, BATCH, LENGTH // 3), generator=generator)
    return torch.cat([third, middle, third], 1)


def step(model: Model, tokens: Tensor, order: Order, rank: int) -> Tensor:
    """The gradient of the whole loss in every parameter, and the loss, on every process."""
    labels = torch.roll(tokens, -1, dims=1)  # Shifted before they are spread out.
    known = torch.arange(LENGTH) >= 2 * LENGTH // 3
    known[-1] = False
    own = order.shard(known, rank, axis=-1)
    logits = model(order.shard(tokens, rank, axis=-1), order)[:, own]
    wanted = order.shard(labels, rank, axis=-1)[:, own]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
    loss = total / (BATCH * int(known.sum()))
    model.zero_grad()
    loss.backward()
    whole = loss.detach()
    dist.all_reduce(whole)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return whole


def main(steps: int = 60) -> list[float]:
    """The loss of every step; to be called in all processes of a group."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    order = balanced(LENGTH, dist.get_world_size(), qkv.Causal())
    losses = []
    for n in range(steps):
        losses.append(step(model, sequences(generator), order, dist.get_rank()).item())
        optimizer.step()
        if dist.get_rank() == 0 and (n % 20 == 0 or n == steps - 1):
            print(f"step {n:3}  loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    qkv.set_num_threads(1)
    if "RANK" not in os.environ:  # Without torchrun, a group of one, at any port that is free.
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
