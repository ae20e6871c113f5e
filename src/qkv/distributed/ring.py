"""Ring attention: queries stay, keys travel, partials merge.

At step s, rank r computes its queries against the keys of rank r - s. Each rank sends its keys to
the rank that needs them next, so that a step that the mask forbids is neither computed nor sent.
The message of the next step is on its way while a step is computed. In the backward pass the
gradients of keys and values travel back to the rank that owns them, which adds them up in the
order of steps. Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for
Near-Infinite Context" (2023).

With `gathered`, all keys are requested at once, and each run of queries is computed against all of
them in one call: fewer and larger messages and calls, for O(n) memory on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.arrays.torch_arrays import TorchArrays
from qkv.distributed.links import Links, Pending
from qkv.distributed.order import Order
from qkv.distributed.parts import GradientSums, Merged, Parts, Residuals, ShardRows

__all__ = ["Ring"]

Array = NDArray[Any]
_LIBRARY = TorchArrays()


@dataclass(slots=True)
class Ring:
    """One call on the ranks of a ring.

    Attributes
    ----------
    parts : Parts
    links : Links
    queries, keys : Order
        Which rows the ranks hold.
    gathered : bool
        Whether all keys are held at once.
    """

    parts: Parts
    links: Links
    queries: Order
    keys: Order
    gathered: bool = False

    @property
    def _own_queries(self) -> ShardRows:
        return ShardRows(self.queries.runs[self.links.rank])

    def forward(
        self,
        query: Array,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        backward: bool = False,
        statistics: bool = False,
    ) -> Merged:
        """Output and lse of this rank's queries, without sinks.

        Parameters
        ----------
        query : array (*batch, heads, rows, head_dim)
        key, value : tensor (*batch, kv_heads, rows, dim)
            This rank's shards.
        backward, statistics : bool
            Whether a backward pass will follow, and whether statistics of the weights are wanted.
        """
        shape = (*query.shape[:-1], value.shape[-1])
        merged = Merged.empty(shape, self.parts.whole.spec.compute_dtype)
        for _, keys, shard in self.key_shards(key, value):
            if shard is not None:
                self.parts.attend(
                    merged, query, self._own_queries, *shard, keys,
                    backward=backward, statistics=statistics,
                )  # fmt: skip
        return merged

    def backward(
        self, query: Array, key: torch.Tensor, value: torch.Tensor, residuals: Residuals,
        tables: dict[str, Array],
    ) -> tuple[GradientSums, Array, Array]:  # fmt: skip
        """Gradients of this rank's queries and of tables, and of its keys and values."""
        dtype = self.parts.whole.spec.compute_dtype
        sums = GradientSums(np.zeros(query.shape, dtype), tables)
        back = _GradientsOnTheirWay(self, key, value)
        for step, keys, shard in self.key_shards(key, value):
            gradients = None
            if shard is not None:
                gradients = self.parts.gradients(
                    residuals, query, self._own_queries, *shard, keys, sums
                )
            back.exchange(step, gradients)
        return sums, *back.finish()

    def is_needed(self, rank: int, owner: int) -> bool:
        """Whether a query of one rank may see a key of another."""
        queries, keys = ShardRows(self.queries.runs[rank]), ShardRows(self.keys.runs[owner])
        return any(True for _ in self.parts.pairs(queries, keys))

    def key_shards(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> Iterator[tuple[int, ShardRows, tuple[Array, Array] | None]]:
        """(step, rows, keys and values), own ones first; None where the mask forbids the step.

        With `gathered` there is one step, with all keys. Every rank makes its steps in this order,
        and so posts its messages in the same order as those that receive them.
        """
        links = self.links
        own = _packed(key, value)
        if self.gathered:
            yield 0, ShardRows((range(self.keys.length),)), self._all_keys(own, key, value)
            return
        buffer: torch.Tensor | None = own
        for step in range(links.ranks):
            pending, following = self._request(step + 1, own, key, value)
            owner = (links.rank - step) % links.ranks
            shard = None if buffer is None else _unpacked(buffer, key, value)
            yield step, ShardRows(self.keys.runs[owner]), shard
            pending.wait()
            buffer = following

    def _request(
        self, step: int, own: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[Pending, torch.Tensor | None]:
        """Begin the messages of a step; nothing is sent that nobody needs."""
        links = self.links
        if step >= links.ranks:
            return links.exchange({}, {}), None
        owner, reader = (links.rank - step) % links.ranks, (links.rank + step) % links.ranks
        sends = {reader: own} if self.is_needed(reader, links.rank) else {}
        if not self.is_needed(links.rank, owner):
            return links.exchange(sends, {}), None
        buffer = self._buffer(owner, key, value)
        return links.exchange(sends, {owner: buffer}), buffer

    def _buffer(self, owner: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        entries = (*key.shape[:-2], self.keys.rows(owner), key.shape[-1] + value.shape[-1])
        return key.new_empty(int(np.prod(entries)))

    def _all_keys(
        self, own: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[Array, Array]:
        links = self.links
        others = [rank for rank in range(links.ranks) if rank != links.rank]
        buffers = {rank: self._buffer(rank, key, value) for rank in others}
        links.exchange(dict.fromkeys(others, own), buffers).wait()
        buffers[links.rank] = own
        shards = [_unpacked(buffers[rank], key, value) for rank in range(links.ranks)]
        k, v = (self.keys.unshard([shard[side] for shard in shards]) for side in (0, 1))
        return k, v


class _GradientsOnTheirWay:
    """Gradients of keys and values, from ranks that computed them to those that own the keys."""

    def __init__(self, ring: Ring, key: torch.Tensor, value: torch.Tensor) -> None:
        self.ring = ring
        dtype = ring.parts.whole.spec.compute_dtype
        self.key, self.value = np.zeros(key.shape, dtype), np.zeros(value.shape, dtype)
        self.waiting: tuple[Pending, torch.Tensor | None, torch.Tensor | None] | None = None

    def exchange(self, step: int, gradients: tuple[Array, Array] | None) -> None:
        """Send the gradients of a step to the owner; what arrived meanwhile is added up."""
        ring, links = self.ring, self.ring.links
        if ring.gathered:
            assert gradients is not None
            self._scatter(*gradients)
            return
        if step == 0:
            if gradients is not None:
                self.key += gradients[0]
                self.value += gradients[1]
            return
        self._collect()
        owner, reader = (links.rank - step) % links.ranks, (links.rank + step) % links.ranks
        sent = buffer = None
        if gradients is not None:
            sent = _packed(*map(torch.from_numpy, gradients))
        if ring.is_needed(reader, links.rank):
            buffer = torch.from_numpy(np.empty(self.key.size + self.value.size, self.key.dtype))
        pending = links.exchange(
            {} if sent is None else {owner: sent}, {} if buffer is None else {reader: buffer}
        )
        self.waiting = pending, buffer, sent

    def finish(self) -> tuple[Array, Array]:
        """The sums of all ranks."""
        self._collect()
        return self.key, self.value

    def _collect(self) -> None:
        if self.waiting is None:
            return
        pending, buffer, _ = self.waiting
        self.waiting = None
        pending.wait()
        if buffer is not None:
            self._add(buffer)

    def _add(self, buffer: torch.Tensor) -> None:
        flat = buffer.numpy()
        self.key += flat[: self.key.size].reshape(self.key.shape)
        self.value += flat[self.key.size :].reshape(self.value.shape)

    def _scatter(self, d_key: Array, d_value: Array) -> None:
        """Every owner gets its rows from every rank, and adds them up in the order of ranks."""
        ring, links = self.ring, self.ring.links
        parts = {}
        for rank in range(links.ranks):
            sides = (ring.keys.shard(of, rank) for of in (d_key, d_value))
            parts[rank] = _packed(*map(torch.from_numpy, sides))
        own = parts.pop(links.rank)
        buffers = {rank: torch.empty_like(own) for rank in parts}
        links.exchange(parts, buffers).wait()
        buffers[links.rank] = own
        for rank in range(links.ranks):
            self._add(buffers[rank])


def _packed(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keys and values as one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(packed: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Array, Array]:
    """Keys and values of a message whose rows have the shapes of these."""
    heads = key.shape[:-2]
    count = int(np.prod(heads))
    width = key.shape[-1] + value.shape[-1]
    rows = packed.numel() // (count * width) if count * width else 0
    flat = _LIBRARY.view(packed, "a message")
    split = count * rows * key.shape[-1]
    return (
        flat[:split].reshape(*heads, rows, key.shape[-1]),
        flat[split:].reshape(*heads, rows, value.shape[-1]),
    )
