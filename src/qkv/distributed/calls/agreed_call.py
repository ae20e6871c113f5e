"""The call that all ranks make: what each was given, compared before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from qkv.arguments.declarations import shown
from qkv.call.binding.bound import bind
from qkv.call.binding.options import DEFAULTS, OptionValues
from qkv.distributed.calls.dtensors import Placed, refuse_transformed
from qkv.distributed.calls.heads import Exchanges, HeadExchange
from qkv.distributed.calls.parts import Parts
from qkv.distributed.calls.ring import Ring
from qkv.distributed.calls.sharded_call import ShardedCall, VariantArrays, whole_call
from qkv.distributed.messages.agreement import compare, fingerprint, in_words, tell
from qkv.distributed.messages.links import Links, checked_seconds, group_of
from qkv.distributed.orders.heads import heads_of, kv_heads_of
from qkv.distributed.orders.order import Order
from qkv.distributed.plan import STRATEGIES, choose_strategy
from qkv.errors import ArgumentError, ShapeError
from qkv.problem.part import check_parts
from qkv.variants.as_variant import as_variant

__all__ = ["Place", "agreed_call", "check_strategy"]


@dataclass(frozen=True, slots=True)
class Place:
    """The two groups of a rank: along which keys travel, and along which heads are shared out."""

    ring: Links
    heads: Links

    @classmethod
    def of(cls, mesh: Any, dim: Any) -> Place:
        if not isinstance(dim, tuple):
            return cls(Links(group_of(mesh, dim)), Links(None))
        if len(dim) != 2:
            raise _unclear(dim, "auto")
        first, second = (Links(group_of(mesh, name)) for name in dim)
        _check_grid(mesh, dim)
        return cls(first, second)

    def limit(self, timeout: Any) -> None:
        """Let messages take as many seconds from here on."""
        self.ring.timeout = self.heads.timeout = checked_seconds(timeout)

    @property
    def ranks(self) -> int:
        return self.ring.ranks * self.heads.ranks

    def flat(self, ring: int, head: int) -> int:
        """The rank in an order, of places along both dimensions."""
        return ring * self.heads.ranks + head

    @property
    def own(self) -> int:
        return self.flat(self.ring.rank, self.heads.rank)

    def over_heads(self) -> Place:
        """The same ranks with heads shared out along the only dimension."""
        return Place(Links(None, self.ring.timeout), self.ring)

    def everyone(self, said: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
        """What all ranks say, by their place in an order, if they agree."""
        along_heads = tell(self.heads, said, device)
        of_heads = [tell(self.ring, of, device) for of in along_heads]
        everyone = [of_head[ring] for ring in range(self.ring.ranks) for of_head in of_heads]
        compare(everyone)
        return everyone

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell the other ranks of an error, since they wait for what this rank says."""
        try:
            yield
        except Exception as error:
            try:
                self.everyone({"own error": in_words(error)}, torch.device("cpu"))
            finally:
                raise error


def check_strategy(strategy: Any, dim: Any) -> None:
    """Refuse a strategy that is not known, or does not fit the dimensions of the mesh."""
    if not isinstance(strategy, str) or strategy not in ("auto", *STRATEGIES):
        raise ArgumentError(
            f"strategy={shown(strategy)} is not known.",
            action=f"Use 'auto', {', '.join(map(repr, STRATEGIES))}.",
        )
    if isinstance(dim, tuple) and strategy == "ulysses":
        raise _unclear(dim, strategy)


def _check_grid(mesh: Any, dim: Any) -> None:
    """Refuse two dimensions of a mesh that are one, or whose groups count ranks in another order.

    torch counts the ranks of a group as they rise. Where they lie otherwise in the mesh, ranks in
    one row of it may have different places in their columns.
    """
    place: list[Any] = list(mesh.get_coordinate())
    for name in dim:
        place[mesh.mesh_dim_names.index(name) if isinstance(name, str) else name] = slice(None)
    ranks = mesh.mesh[tuple(place)]
    if ranks.ndim != 2:
        raise _unclear(dim, "auto")
    if not all(bool((ranks.diff(dim=axis) > 0).all()) for axis in range(2)):
        raise ArgumentError(
            f"the ranks of the mesh do not rise along both dimensions of dim={shown(dim)}.",
            [("ranks", str(ranks.tolist()))],
            "Make the mesh of ranks that rise along each dimension, as init_device_mesh does.",
        )


def _unclear(dim: Any, strategy: str) -> ArgumentError:
    return ArgumentError(
        f"dim={shown(dim)} with strategy={shown(strategy)} does not say what is spread along what.",
        action="Name two dimensions, that of the ring and that of the heads, with "
        'strategy="ring" or "gather".',
    )


def agreed_call(
    where: Place,
    shards: Placed,
    variants: Sequence[Any],
    options: OptionValues,
    strategy: str,
    order: Order | None,
    kv_order: Order | None,
    **of_function: Any,
) -> tuple[ShardedCall, Exchanges]:
    """The call that all ranks make, after they have told each other what they were given.

    `of_function` is what else is compared: the function, and what it has done itself.
    """
    query, key, value = shards.tensors
    device = query.device
    with where.told():
        given = bind(query, key, value, variants, options)
        for array, role in zip(given.leaves[3:], given.roles[3:], strict=True):
            refuse_transformed(array, role)
    kv_order = order if kv_order is None else kv_order
    said = {
        **of_function,
        "dtype": str(query.dtype),
        "shape of query without rows": str((*query.shape[:-2], query.shape[-1])),
        "shape of key without rows": str((*key.shape[:-2], key.shape[-1])),
        "shape of value without rows": str((*value.shape[:-2], value.shape[-1])),
        "number of variants": len(variants),
        "strategy": strategy,
        "order": _digest(order),
        "order of keys": _digest(kv_order),
        "own rows": [query.shape[-2], key.shape[-2]],
        "own error": shards.problem or _no_order(order, "order") or _no_order(kv_order, "kv_order"),
    }
    everyone = where.everyone(said, device)
    orders = []
    for side, wanted in enumerate((order, kv_order)):
        held = [of["own rows"][side] for of in everyone]
        orders.append(Order.of_sizes(held) if wanted is None else wanted)
        _check_rows(orders[-1], held)
    sizes = query.shape[-3], key.shape[-3], orders[0].length, orders[1].length
    backward = torch.is_grad_enabled()
    with where.told():
        heads_first = options._replace(layout="bhld")  # as `placed` has arranged the shards
        whole, arrays = whole_call(
            query, key, value, variants, heads_first, sizes, backward=backward
        )
        name = strategy
        if strategy == "auto":
            name = choose_strategy(whole.problem, *orders, two=where.heads.ranks > 1)
        spread = where.over_heads() if name == "ulysses" else where
        built = _built(spread, whole, arrays, orders, name, options.backend)
        second = {
            "own rows": [],
            "what variants and options come to": fingerprint(whole.problem),
            "own what variants and options come to": _in_words(whole.variants, options),
            "whether gradients are wanted": _wanted_gradients(
                shards.tensors, arrays, exchanged=spread.heads.ranks > 1
            ),
        }
    where.everyone(second, device)
    return built


def _in_words(variants: Sequence[tuple[Any, Any]], options: OptionValues) -> str:
    """The variants of a call, and the options that are not at their defaults."""
    given = [repr(as_variant(known)) for _, known in variants]
    for name, value, default in zip(options._fields, options, DEFAULTS, strict=True):
        if value is not default:
            given.append(f"{name}={value!r}")
    return ", ".join(one[:100] for one in given)[:400]


def _wanted_gradients(
    tensors: Sequence[torch.Tensor], arrays: VariantArrays, *, exchanged: bool
) -> str:
    """Whether a backward pass may follow, and the places of arrays that have gradients too.

    Where heads are exchanged, the gradients of rows are as well, unless no rows have any.
    """
    of_rows = any(of.requires_grad for of in tensors)
    if not torch.is_grad_enabled() or not (of_rows or arrays.places):
        return "no"
    also = "also" if of_rows or not exchanged else "only"
    return f"yes, {also} of arrays {list(arrays.places)}" if arrays.places else "yes"


def _built(
    where: Place,
    whole: Any,
    arrays: Any,
    orders: Sequence[Order],
    strategy: str,
    backend: str,
) -> tuple[ShardedCall, Exchanges]:
    """What this rank computes, and the exchanges of heads before and after it."""
    spec, ranks = whole.problem.spec, where.heads.ranks
    check_parts(spec)
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


def _no_order(given: Any, name: str) -> str:
    """What is wrong with what was given as an order, if anything is."""
    if given is None or isinstance(given, Order):
        return ""
    return f"{name}={shown(given)} is not a qkv.distributed.Order, as Order.zigzag makes one."


def _digest(order: Any) -> str:
    """A short text that differs between orders."""
    if not isinstance(order, Order):
        return ""
    digest = blake2b(repr(order.runs).encode(), digest_size=8).hexdigest()
    return f"{order.name}, {order.length} rows on {order.ranks} ranks, {digest}"
