"""Ulysses: an all-to-all that turns rows of all heads into all rows of some heads, and back.

Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qkv.distributed.messages.links import Links

__all__ = ["Exchanges", "HeadExchange", "from_heads", "to_heads"]

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """One exchange: which heads each rank has afterwards, and which rows it has before.

    Attributes
    ----------
    links : Links
    heads : tuple of range
        Those of each rank.
    numbers : tuple of arrays
        The row numbers in the whole sequence that each rank holds.
    """

    links: Links
    heads: tuple[range, ...]
    numbers: tuple[Any, ...]

    def to_heads(self, x: Tensor) -> Callable[[], Tensor]:
        """`(..., all heads, own rows, d)` to `(..., own heads, all rows, d)`, rows rising.

        The messages begin at once; the function returned waits for them.
        """
        own = self.links.rank
        mine = len(self.heads[own])
        parts = {
            r: x[..., h.start : h.stop, :, :].contiguous() for r, h in enumerate(self.heads)
        }  # fmt: skip
        buffers = {
            r: x.new_empty((*x.shape[:-3], mine, len(rows), x.shape[-1]))
            for r, rows in enumerate(self.numbers)
            if r != own
        }
        pending = self.links.exchange({r: parts[r] for r in buffers}, buffers)

        def finish() -> Tensor:
            pending.wait()
            buffers[own] = parts[own]
            together = torch.cat([buffers[r] for r in range(self.links.ranks)], dim=-2)
            return together.index_select(-2, self._sorted().to(x.device))

        return finish

    def from_heads(self, x: Tensor) -> Callable[[], Tensor]:
        """The transpose of `to_heads`: where ranks have a head alike, the sum of what they have."""
        own = self.links.rank
        order = self._sorted()
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device="cpu")
        pieces = x.index_select(-2, back.to(x.device)).split(
            [len(rows) for rows in self.numbers], dim=-2
        )
        parts = {r: piece.contiguous() for r, piece in enumerate(pieces)}
        rows = len(self.numbers[own])
        buffers = {
            r: x.new_empty((*x.shape[:-3], len(heads), rows, x.shape[-1]))
            for r, heads in enumerate(self.heads)
            if r != own
        }
        pending = self.links.exchange({r: parts[r] for r in buffers}, buffers)

        def finish() -> Tensor:
            pending.wait()
            buffers[own] = parts[own]
            count = max(heads.stop for heads in self.heads)
            whole = x.new_zeros((*x.shape[:-3], count, rows, x.shape[-1]))
            for r, heads in enumerate(self.heads):  # In the order of ranks, so that bits repeat.
                whole[..., heads.start : heads.stop, :, :] += buffers[r]
            return whole

        return finish

    def _sorted(self) -> Tensor:
        numbers: Sequence[Any] = [np.asarray(rows) for rows in self.numbers]
        return torch.from_numpy(np.argsort(np.concatenate(numbers), kind="stable"))


Exchanges = tuple[HeadExchange | None, ...]


class _Exchanged(torch.autograd.Function):
    """Exchanges in one direction, all begun before the first is awaited.

    The gradient takes the other direction, which is the transpose.
    """

    @staticmethod
    def forward(
        ctx: Any, exchanges: tuple[HeadExchange, ...], back: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchanges, ctx.back = exchanges, back
        begun = [
            exchange.from_heads(x) if back else exchange.to_heads(x)
            for exchange, x in zip(exchanges, tensors, strict=True)
        ]
        return tuple(finish() for finish in begun)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *_Exchanged.apply(ctx.exchanges, not ctx.back, *gradients)


def to_heads(exchanges: Exchanges, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`HeadExchange.to_heads`, followed by autograd; the tensors themselves without exchanges."""
    return _exchanged(exchanges, False, tensors)


def from_heads(exchanges: Exchanges, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`HeadExchange.from_heads`, followed by autograd; the tensors themselves without exchanges."""
    return _exchanged(exchanges, True, tensors)


def _exchanged(exchanges: Exchanges, back: bool, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if None in exchanges:
        return tuple(tensors)
    exchanged: tuple[Tensor, ...] = _Exchanged.apply(exchanges, back, *tensors)
    return exchanged
