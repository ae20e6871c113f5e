"""Scores of the heads of a layer whose rows are spread over ranks, as in one process.

Each score is a pass of attention in which a mask allows some keys
(`qkv.inspection.heads.layer_heads`); here keys travel in each of them, and nothing is sent to ranks
whose queries see none of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.call.binding.options import OptionValues
from qkv.distributed.attention import attention, inspect
from qkv.distributed.calls.sharded_call import whole_call
from qkv.distributed.messages.links import Links, group_of
from qkv.distributed.orders.order import Order
from qkv.inspection.heads.layer_heads import LayerHeads, needs_float64, without_dropout
from qkv.inspection.heads.score_rows import SCORES, HeadScores
from qkv.partial import Partial
from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.masks.algebra import MaskVariant
from qkv.variants.masks.dense_mask import Mask

__all__ = ["AtOffset", "ShardHeadScores", "shard_head_scores"]

Array = NDArray[Any]


@dataclass(frozen=True, eq=False, repr=False)
class AtOffset(MaskVariant):
    """Allowed where `kv_pos = q_pos + offset`."""

    offset: int

    def lower(self, builder: Builder) -> None:
        builder.mask(builder.kv_pos == builder.q_pos + builder.scalar(self.offset, "offset"))

    def naive(self, dense: Dense) -> None:
        dense.allowed &= dense.kv_pos == dense.q_pos[:, None] + self.offset

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[AtOffset]:
        return (cls(-1), cls(0))


@dataclass(frozen=True, slots=True, eq=False)
class ShardHeadScores(HeadScores):
    """The scores of this rank's rows, and the means over the rows of all ranks.

    Attributes
    ----------
    rows, counted, top_keys, top_weights
        Of the queries of this rank, in the order of its shard; keys by their number in the whole.
    received : array (batch, num_heads, own keys)
        From the queries of all ranks.
    total : (array, array)
        What `sums` gives for all ranks.
    """

    total: tuple[Array, Array] = field(kw_only=True)

    def sums(self) -> tuple[Array, Array]:
        """The sums over the rows of all ranks."""
        return self.total


def shard_head_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    *variants: Any,
    tokens: Any = None,
    real: Any = None,
    real_queries: Any = None,
    scale: float | None = None,
    top: int = 4,
    one_sequence: bool = True,
    order: Order,
    **options: Any,
) -> ShardHeadScores:
    """Scores of every head of one layer; every rank calls it.

    Parameters
    ----------
    query, key : tensor (batch, heads, own rows, head_dim)
    *variants, scale
        Of the whole sequence, as for `qkv.distributed.attention`.
    tokens, real, real_queries : array (batch, length), optional
        Of the whole sequence; see `qkv.inspection.heads.head_scores.head_scores`.
    top, one_sequence
        See there.
    order : Order
        Which rows each rank holds.
    mesh, dim, strategy, timeout
        As for `qkv.distributed.attention`.
    """
    links = Links(group_of(options.get("mesh"), options.get("dim")), options["timeout"])
    rows = real, real_queries, one_sequence
    given = (query, key, without_dropout(variants), scale, rows, order, links, options)
    heads = _ShardedLayer(torch.float64 if query.dtype == torch.float64 else torch.float32, *given)
    # All ranks need the finer type where one of them does.
    large = torch.tensor([float(needs_float64(heads.lse))], device="cpu")
    if query.dtype != torch.float64 and links.summed(large).item():
        heads = _ShardedLayer(torch.float64, *given)
    scores = heads.scores(tokens, top, one_sequence)
    sums, counts = (torch.from_numpy(of) for of in scores.sums())
    at = SCORES.index("max_logit")
    total = links.summed(torch.where(torch.isneginf(sums), 0.0, sums)).numpy()
    total[at] = np.max([of.numpy() for of in links.all_to_all(sums[at].contiguous())], axis=0)
    return ShardHeadScores(
        scores.rows, scores.counted, scores.received, scores.top_keys, scores.top_weights, None,
        total=(total, links.summed(counts).numpy()),
    )  # fmt: skip


class _ShardedLayer(LayerHeads):
    """A layer whose keys travel."""

    def __init__(
        self,
        dtype: torch.dtype,
        query: torch.Tensor,
        key: torch.Tensor,
        variants: tuple[Any, ...],
        scale: float | None,
        rows: tuple[Any, Any, bool],
        order: Order,
        links: Links,
        options: dict[str, Any],
    ) -> None:
        self._query, self._key = query.to(dtype).contiguous(), key.to(dtype).contiguous()
        self._order, self._links = order, links
        self._options = {"scale": scale, "order": order, **options}
        self.variants = variants
        real, real_queries, one_sequence = rows
        batch, num_kv_heads, own_rows, _ = key.shape
        value = torch.ones((batch, num_kv_heads, own_rows, 2), dtype=dtype, device="cpu")
        length = order.length
        whole, _ = whole_call(
            self._query, self._key, value, variants, OptionValues(scale=scale),
            (query.shape[1], num_kv_heads, length, length), backward=False,
        )  # fmt: skip
        operands = whole.problem.operands
        self.q_pos = np.broadcast_to(operands.positions.query_positions(), (batch, length))
        self.kv_pos = np.broadcast_to(operands.positions.key_positions(), (batch, length))
        value[..., 0] = torch.from_numpy(self.own(self.kv_pos - self.origin).copy())[:, None]
        self._value = value
        self.sinks = operands.sinks
        self.real = self.real_keys(real)
        self.real_queries = self.real_queries_of(real_queries, one_sequence)
        if not self.real_queries.all():
            self.variants += (Mask(self.real_queries[:, None, :, None]),)
        looking = {name: of for name, of in self._options.items() if name != "strategy"}
        self._record = inspect(self._query, self._key, value, *self.variants, **looking)
        self.lse, self.out = self._record.lse.numpy(), self._record.output.numpy()
        self.entropy = self._record.entropy.numpy()
        self.max_weight = self._record.max_weight.numpy()

    def own(self, rows: Array) -> Array:
        return np.asarray(self._order.shard(rows, self._links.rank, axis=-1))

    def masked(self, keys: Any) -> Partial:
        # Autocast would narrow them, and NumPy has no bfloat16.
        with torch.no_grad(), torch.autocast(self._query.device.type, enabled=False):
            out, lse = attention(
                self._query, self._key, self._value, *self.variants, keys,
                return_lse=True, **self._options,
            )  # fmt: skip
        return Partial(out.numpy(), lse.numpy())

    def mass_at(self, offset: int) -> Array:
        return self.mass(AtOffset(offset))

    def mass_of(self, keys: Array) -> Array:
        return self.mass(Mask(keys[:, None, None, :]))

    def received(self) -> Array:
        return self._record.received().numpy()

    def top(self, k: int) -> tuple[Array, Array]:
        numbers, weights = self._record.top(k)
        return numbers.numpy(), weights.numpy()
