"""Ring attention: queries stay, keys travel, partials merge.

At step s, rank r computes its queries against the keys of rank r - s. Each rank sends to the rank
that computes next those runs of its keys that a query there may see, so that what the mask forbids
is neither computed nor sent.
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
from qkv.distributed.calls.parts import GradientSums, Merged, Parts, Places, Residuals, ShardRows
from qkv.distributed.messages.links import Links, Pending
from qkv.distributed.orders.order import Order

__all__ = ["Ring"]

Array = NDArray[Any]
_LIBRARY = TorchArrays()
_Sides = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, or their gradients."""


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
        back = _GradientsOnTheirWay(self, np.zeros(key.shape, dtype), np.zeros(value.shape, dtype))
        for step, keys, shard in self.key_shards(key, value):
            gradients = None
            if shard is not None:
                gradients = self.parts.gradients(
                    residuals, query, self._own_queries, *shard, keys, sums
                )
            back.exchange(step, gradients)
        return sums, *back.finish()

    def needed(self, rank: int, owner: int) -> Places:
        """The runs of an owner's keys that a query of a rank may see, and their place there."""
        queries, keys = ShardRows(self.queries.runs[rank]), ShardRows(self.keys.runs[owner])
        return self.parts.needed(queries, keys)

    def key_shards(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> Iterator[tuple[int, ShardRows, tuple[Array, Array] | None]]:
        """(step, rows, keys and values), own ones first; None where the mask forbids the step.

        A step with another rank has only those of its rows that a query here may see.

        With `gathered` there is one step, with all keys. Every rank makes its steps in this order,
        and so posts its messages in the same order as those that receive them.
        """
        links = self.links
        if self.gathered:
            yield 0, ShardRows((range(self.keys.length),)), self._all_keys(key, value)
            return
        rows = ShardRows(self.keys.runs[links.rank])
        shard: _Sides | None = key, value
        for step in range(links.ranks):
            pending, following, buffer = self._request(step + 1, key, value)
            yield step, rows, None if shard is None else _views(shard)
            pending.wait()
            rows, shard = following, buffer

    def _request(
        self, step: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[Pending, ShardRows, _Sides | None]:
        """Begin the messages of a step; nothing is sent that nobody needs."""
        links = self.links
        if step >= links.ranks:
            return links.exchange({}, {}), ShardRows(()), None
        owner, reader = (links.rank - step) % links.ranks, (links.rank + step) % links.ranks
        there, here = self.needed(reader, links.rank), self.needed(links.rank, owner)
        sends = {reader: _rows_at(there, key, value)} if there else {}
        rows = ShardRows(tuple(run for run, _ in here))
        buffers = {owner: _empty_rows(len(rows), key, value)} if here else {}
        return links.exchange(sends, buffers), rows, buffers.get(owner)

    def _all_keys(self, key: torch.Tensor, value: torch.Tensor) -> tuple[Array, Array]:
        links, own = self.links, (key.contiguous(), value.contiguous())
        others = [rank for rank in range(links.ranks) if rank != links.rank]
        buffers = {rank: _empty_rows(self.keys.rows(rank), key, value) for rank in others}
        links.exchange(dict.fromkeys(others, own), buffers).wait()
        buffers[links.rank] = own
        shards = [_views(buffers[rank]) for rank in range(links.ranks)]
        k, v = (self.keys.unshard([shard[side] for shard in shards]) for side in (0, 1))
        return k, v


class _GradientsOnTheirWay:
    """Gradients of keys and values, from ranks that computed them to those that own the keys."""

    def __init__(self, ring: Ring, key: Array, value: Array) -> None:
        self.ring, self.key, self.value = ring, key, value
        self.waiting: tuple[Pending, Places, _Sides | None] | None = None

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
        places = ring.needed(reader, links.rank)
        sent = None if gradients is None else _tensors(*gradients)
        rows = sum(len(run) for run, _ in places)
        buffer = _empty_rows(rows, *_tensors(self.key, self.value)) if places else None
        pending = links.exchange(
            {} if sent is None else {owner: sent}, {} if buffer is None else {reader: buffer}
        )
        self.waiting = pending, places, buffer

    def finish(self) -> tuple[Array, Array]:
        """The sums of all ranks."""
        self._collect()
        return self.key, self.value

    def _collect(self) -> None:
        if self.waiting is None:
            return
        pending, places, buffer = self.waiting
        self.waiting = None
        pending.wait()
        if buffer is not None:
            self._add(buffer, places)

    def _add(self, gradients: _Sides, places: Places) -> None:
        rows = ShardRows(tuple(run for run, _ in places))
        for (_, own), (_, at) in zip(places, rows, strict=True):
            for total, gradient in zip((self.key, self.value), gradients, strict=True):
                total[..., own, :] += gradient[..., at, :].numpy()

    def _scatter(self, d_key: Array, d_value: Array) -> None:
        """Every owner gets its rows from every rank, and adds them up in the order of ranks."""
        ring, links = self.ring, self.ring.links
        parts = {}
        for rank in range(links.ranks):
            parts[rank] = _tensors(*(ring.keys.shard(of, rank) for of in (d_key, d_value)))
        own = parts.pop(links.rank)
        buffers = {rank: _empty_rows(ring.keys.rows(links.rank), *own) for rank in parts}
        links.exchange(parts, buffers).wait()
        buffers[links.rank] = own
        places = tuple(ShardRows(ring.keys.runs[links.rank]))
        for rank in range(links.ranks):
            self._add(buffers[rank], places)


def _rows_at(places: Places, key: torch.Tensor, value: torch.Tensor) -> _Sides:
    """Some runs of a shard's rows, one after another; not copied where they are all of it."""

    def taken(side: torch.Tensor) -> torch.Tensor:
        runs = [side[..., at, :] for _, at in places]
        return runs[0].contiguous() if len(runs) == 1 else torch.cat(runs, -2)

    return taken(key), taken(value)


def _empty_rows(rows: int, key: torch.Tensor, value: torch.Tensor) -> _Sides:
    """Memory for so many rows, whose other sizes and types are those of these."""
    of_key, of_value = (of.new_empty((*of.shape[:-2], rows, of.shape[-1])) for of in (key, value))
    return of_key, of_value


def _views(sides: _Sides) -> tuple[Array, Array]:
    key, value = sides
    return _LIBRARY.view(key, "key"), _LIBRARY.view(value, "value")


def _tensors(key: Array, value: Array) -> _Sides:
    """Tensors that share the memory of a key and a value without gaps."""
    return torch.from_numpy(key), torch.from_numpy(value)
