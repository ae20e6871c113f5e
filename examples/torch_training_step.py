"""Train a small causal transformer in torch through qkv: it learns to repeat a random sequence.

The second half of every row repeats the first, so that the next token can be known there by looking
back. `python examples/torch_training_step.py` prints the loss as it falls, in some seconds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import qkv
from qkv.torch import MultiHeadAttention

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 16, 32, 64, 4, 2, 32


class Layer(nn.Module):
    """Attention with trained slopes, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = MultiHeadAttention(WIDTH, HEADS, causal=True)
        self.slopes = nn.Parameter(torch.tensor([2.0, 0.5, 0.1, 0.02]))
        self.rest = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), None, None, qkv.ALiBi(self.slopes))
        return x + self.rest(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def sequences(generator: torch.Generator) -> Tensor:
    half = torch.randint(VOCABULARY, (BATCH, LENGTH // 2), generator=generator)
    return torch.cat([half, half], 1)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean negative log probability, in nats, of the tokens that can be known."""
    logits = model(tokens[:, :-1])[:, LENGTH // 2 :]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1 + LENGTH // 2 :].flatten())


def main(steps: int = 200) -> tuple[float, float]:
    """The loss before and after."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    values = []
    for n in range(steps):
        loss = loss_of(model, sequences(generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
        if n % 20 == 0 or n == steps - 1:
            print(f"step {n:3}  loss {values[-1]:.3f}")
    return values[0], values[-1]


if __name__ == "__main__":
    # A model this small is quickest on one thread. torch's threads spin while they wait for each
    # other, and beside other work on the same cores that took four times as long. For large models
    # leave both as they are and set OMP_WAIT_POLICY=passive, so that torch's threads sleep instead.
    torch.set_num_threads(1)
    qkv.set_num_threads(1)
    first, last = main()
    print(f"from {first:.2f} (guessing: {math.log(VOCABULARY):.2f}) to {last:.2f} nats")
