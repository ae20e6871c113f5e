"""Attention over a sequence that is spread over ranks: the public function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Unpack

import numpy as np
import torch

from qkv.call.options import OptionValues, Options, option_values, with_options
from qkv.distributed.agreement import agree, fingerprint, in_words
from qkv.distributed.dtensors import Placed, placed
from qkv.distributed.heads import HeadExchange, from_heads, heads_of, kv_heads_of, to_heads
from qkv.distributed.links import TIMEOUT, Links, group_of
from qkv.distributed.order import Order
from qkv.distributed.parts import Parts
from qkv.distributed.plan import STRATEGIES, choose_strategy
from qkv.distributed.ring import Ring
from qkv.distributed.sharded_call import ShardedCall, attend_sharded, whole_call
from qkv.errors import ArgumentError, QkvError, ShapeError, UnsupportedError

__all__ = ["attention"]

Tensor = torch.Tensor


@with_options
@torch._dynamo.disable
def attention(
    query: Any,
    key: Any,
    value: Any,
    *variants: Any,
    mesh: Any = None,
    dim: str | tuple[str, str] | None = None,
    strategy: str = "auto",
    order: Order | None = None,
    kv_order: Order | None = None,
    return_lse: bool = False,
    timeout: float = TIMEOUT,
    **options: Unpack[Options],
) -> Any:
    """Attention over a sequence whose rows are spread over ranks; exact, in O(n / ranks) memory.

        out = softmax(scale * Q K^T + ...) V   over the rows of all ranks

    Every rank calls it with its own rows, and with the same variants and options, which describe
    the *whole* sequence: a mask array is of all rows, a `Segments` has the ids of all rows.

    Parameters
    ----------
    query : Tensor or DTensor (..., num_heads, own rows, head_dim)
        The rows of this rank; float64, float32, float16 or bfloat16. A DTensor is sharded along the
        length, on the dimension of the mesh that `dim` names.
    key : Tensor or DTensor (..., num_kv_heads, own rows, head_dim)
    value : Tensor or DTensor (..., num_kv_heads, own rows, v_head_dim)
    *variants
        As for `qkv.attention`, of the whole sequence; all but `Dropout`.
    mesh : DeviceMesh or ProcessGroup, optional
        All processes unless given.
    dim : str or (str, str), optional
        Dimension of the mesh. Two names are two dimensions: keys travel along the first, and heads
        are shared out along the second.
    strategy : "auto", "ring", "gather" or "ulysses"
        "ring": keys travel, and each rank holds those of two ranks at a time. "gather": each rank
        holds all keys. "ulysses": each rank computes some heads of all rows. "auto" takes what
        `qkv.distributed.plan` predicts to be the quickest. With two dimensions, "ring" or "gather"
        for the first.
    order : Order, optional
        Which rows of the whole each rank holds. Neighbouring rows in the order of ranks, unless
        given.
    kv_order : Order, optional
        That of keys and values; `order` unless given.
    return_lse : bool
        Return `(output, lse)`.
    timeout : float
        Seconds that this rank waits for a message of another.
    scale, layout, q_offset, kv_offset, backend
        As for `qkv.attention`; offsets are those of the whole sequence.

    Returns
    -------
    Tensor, or (Tensor, Tensor)
        Output of this rank's rows, like the query (a DTensor for one), and lse `(..., num_heads,
        own rows)`. Both can be differentiated once. The gradient of an array of a variant (bias,
        sinks, slopes) is that of the whole, on every rank.

    Raises
    ------
    DistributedError
        If ranks were called with different things, or one does not answer within the timeout; the
        message names it. Nothing wrong is computed.
    UnsupportedError, ShapeError, DTypeError, ArgumentError
        As `qkv.attention` does.

    Notes
    -----
    Parts are merged, and gradients added up, in an order that does not depend on timing: every run
    gives the same bits. A ring sends `(head_dim + v_head_dim) * num_kv_heads` numbers for each key
    to every rank whose queries may see it. Source: Liu, Zaharia and Abbeel, "Ring Attention" (2023);
    Jacobs et al., "DeepSpeed Ulysses" (2023).

    Examples
    --------
    In a program started by `torchrun --nproc-per-node 2`::

        torch.distributed.init_process_group("gloo")
        order = qkv.distributed.balanced(16384, 2, qkv.Causal())
        q, k, v = (order.shard(x, torch.distributed.get_rank()) for x in (q, k, v))
        out = qkv.distributed.attention(q, k, v, qkv.Causal(), order=order)
    """
    values = option_values("attention", options)
    where = _Place.of(mesh, dim, strategy, timeout)
    shards = placed(query, key, value, values.layout, mesh, dim)
    call, exchanges = _agreed(where, shards, variants, values, strategy, order, kv_order)
    q, k, v = (
        to_heads(exchange, x) for exchange, x in zip(exchanges, shards.tensors, strict=True)
    )
    out, lse = attend_sharded(call, q, k, v)
    out = from_heads(exchanges[0], out)
    if not return_lse:
        return shards.restored(out)
    return shards.restored(out), shards.rows(from_heads(exchanges[0], lse[..., None])[..., 0])


@dataclass(frozen=True, slots=True)
class _Place:
    """The two groups of a rank: along which keys travel, and along which heads are shared out."""

    ring: Links
    heads: Links

    @classmethod
    def of(cls, mesh: Any, dim: Any, strategy: str, timeout: float) -> _Place:
        if strategy not in ("auto", *STRATEGIES):
            raise ArgumentError(
                f"strategy={strategy!r} is not known.",
                action=f"Use 'auto', {', '.join(map(repr, STRATEGIES))}.",
            )
        if not isinstance(dim, tuple):
            links = Links(group_of(mesh, dim), timeout)
            return cls(links, Links(None, timeout))
        if len(dim) != 2 or strategy == "ulysses":
            raise ArgumentError(
                f"dim={dim!r} with strategy={strategy!r} does not say what is spread along what.",
                action="Name two dimensions, that of the ring and that of the heads, with "
                'strategy="ring" or "gather".',
            )
        first, second = (Links(group_of(mesh, name), timeout) for name in dim)
        return cls(first, second)

    @property
    def ranks(self) -> int:
        return self.ring.ranks * self.heads.ranks

    def flat(self, ring: int, head: int) -> int:
        """The rank in an order, of places along both dimensions."""
        return ring * self.heads.ranks + head

    @property
    def own(self) -> int:
        return self.flat(self.ring.rank, self.heads.rank)

    def over_heads(self) -> _Place:
        """The same ranks with heads shared out along the only dimension."""
        return _Place(Links(None, self.ring.timeout), self.ring)

    def everyone(self, said: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
        """What all ranks say, by their place in an order, if they agree."""
        found = []
        for of in agree(self.heads, said, device):
            said = {**said, "own rows": of["own rows"]}
            found.append(agree(self.ring, said, device))
        return [found[head][ring] for ring in range(self.ring.ranks) for head in range(len(found))]


def _agreed(
    where: _Place,
    shards: Placed,
    variants: Sequence[Any],
    options: OptionValues,
    strategy: str,
    order: Order | None,
    kv_order: Order | None,
) -> tuple[ShardedCall, tuple[HeadExchange | None, ...]]:
    """The call that all ranks make, after they have told each other what they were given."""
    query, key, value = shards.tensors
    device = query.device
    kv_order = order if kv_order is None else kv_order
    said = {
        "dtype": str(query.dtype),
        "shape of query without rows": str((*query.shape[:-2], query.shape[-1])),
        "shape of key without rows": str((*key.shape[:-2], key.shape[-1])),
        "shape of value without rows": str((*value.shape[:-2], value.shape[-1])),
        "number of variants": len(variants),
        "strategy": strategy,
        "order": _digest(order),
        "order of keys": _digest(kv_order),
        "own rows": [query.shape[-2], key.shape[-2]],
        "own error": shards.problem,
    }
    everyone = where.everyone(said, device)
    orders = []
    for side, given in enumerate((order, kv_order)):
        sizes = [of["own rows"][side] for of in everyone]
        orders.append(Order.of_sizes(sizes) if given is None else given)
        _check_rows(orders[-1], sizes)
    sizes = query.shape[-3], key.shape[-3], orders[0].length, orders[1].length
    backward = torch.is_grad_enabled()
    built: Any = None
    error: QkvError | None = None
    try:
        heads_first = options._replace(layout="bhld")  # as `placed` has arranged the shards
        whole, arrays = whole_call(
            query, key, value, variants, heads_first, sizes, backward=backward
        )
        name = strategy
        if strategy == "auto":
            name = choose_strategy(whole.problem, *orders, two=where.heads.ranks > 1)
        if name == "ulysses":
            where = where.over_heads()
        built = _built(where, whole, arrays, orders, name, options.backend)
    except QkvError as caught:
        error = caught
    second = {
        "what variants and options come to": "" if built is None else fingerprint(whole.problem),
        "own rows": [],
        "own error": "" if error is None else in_words(error),
    }
    if error is not None:
        second["what variants and options come to"] = "an error"
    try:
        where.everyone(second, device)
    finally:
        if error is not None:
            raise error
    return built


def _built(
    where: _Place,
    whole: Any,
    arrays: Any,
    orders: Sequence[Order],
    strategy: str,
    backend: str,
) -> tuple[ShardedCall, tuple[HeadExchange | None, ...]]:
    """What this rank computes, and the exchanges of heads before and after it."""
    spec, ranks = whole.problem.spec, where.heads.ranks
    heads = [heads_of(spec.num_heads, ranks, r) for r in range(ranks)]
    kv_heads = [kv_heads_of(spec.num_heads, spec.num_kv_heads, ranks, r) for r in range(ranks)]
    exchanges: list[HeadExchange | None] = [None, None, None]
    grouped = list(orders)
    if ranks > 1:
        for side, order in enumerate(orders):
            numbers = tuple(
                order.position_ids(where.flat(where.ring.rank, r)) for r in range(ranks)
            )
            shared = tuple(heads if side == 0 else kv_heads)
            exchanges[side] = HeadExchange(where.heads, shared, numbers)
            grouped[side] = order.joined(ranks)
        exchanges[2] = exchanges[1]
    own = where.heads.rank
    parts = Parts(whole.problem, backend, heads[own], kv_heads[own])
    ring = Ring(parts, where.ring, grouped[0], grouped[1], gathered=strategy == "gather")
    call = ShardedCall(whole, ring, arrays, (where.heads, where.ring))
    return call, tuple(exchanges)


def _check_rows(order: Order, sizes: Sequence[int]) -> None:
    """Raise unless every rank holds the rows of the order."""
    held = [order.rows(rank) for rank in range(order.ranks)]
    if held != list(sizes):
        raise ShapeError(
            f"the ranks hold {list(sizes)} rows, the order says {held}.",
            [("order", f"{order.name}, {order.length} rows on {order.ranks} ranks")],
            "Shard query, key and value with order.shard(x, rank).",
        )


def _digest(order: Order | None) -> str:
    """A short text that differs between orders."""
    if order is None:
        return ""
    digest = blake2b(repr(order.runs).encode(), digest_size=8).hexdigest()
    return f"{order.name}, {order.length} rows on {order.ranks} ranks, {digest}"
