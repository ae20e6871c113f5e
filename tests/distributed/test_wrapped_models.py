"""Parameters of variants in models that torch wraps: DistributedDataParallel and FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qkv

HEADS, WIDTH, TOKENS = 4, 16, 12


class Layer(torch.nn.Module):
    """Causal attention with sinks, of all tokens or of those that ranks share out."""

    def __init__(self, *, over_ranks: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(3 * WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        self.weight = torch.nn.Parameter(weight)
        self.sinks = torch.nn.Parameter(torch.zeros(HEADS, dtype=torch.float64))
        self.over_ranks = over_ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from qkv.distributed import attention

        projected = (x @ self.weight.mT).chunk(3, dim=-1)
        operands = [t.unflatten(-1, (HEADS, -1)).swapaxes(-2, -3) for t in projected]
        variants = qkv.Causal(), qkv.Sinks(self.sinks)
        if self.over_ranks:
            return attention(*operands, *variants, timeout=60)
        return qkv.attention(*operands, *variants)


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def gradients(rank: int, ranks: int, wrapper: str, over_ranks: bool) -> list[torch.Tensor]:
    """The gradients of weight and sinks, as the wrapper leaves them: means over ranks."""
    model: Any = Layer(over_ranks=over_ranks)
    own = tokens().chunk(ranks, dim=1)[rank] if over_ranks else tokens()
    if wrapper == "FSDP":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        model(own).pow(2).sum().backward()
        return [of.grad.full_tensor() for of in (model.weight, model.sinks)]
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(own).pow(2).sum().backward()
    return [model.weight.grad, model.sinks.grad]


@pytest.mark.parametrize("over_ranks", [False, True])
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP"])
def test_gradients_of_wrapped_models(group: Any, wrapper: str, over_ranks: bool) -> None:
    """FSDP frees the memory of parameters after the forward pass, also that of sinks."""
    model = Layer(over_ranks=False)
    projected = (tokens() @ model.weight.mT).chunk(3, dim=-1)
    query, key, value = (t.unflatten(-1, (HEADS, -1)).swapaxes(-2, -3) for t in projected)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf)
    column = model.sinks[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    (weights @ value).pow(2).sum().backward()
    for of_weight, of_sinks in group(2)(gradients, wrapper, over_ranks):
        # A rank's own rows give a part of the first, the second is that of the whole.
        torch.testing.assert_close(of_weight * (2 if over_ranks else 1), model.weight.grad)
        torch.testing.assert_close(of_sinks, model.sinks.grad)
