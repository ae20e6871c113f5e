"""The attention of a model whose sequence is spread over ranks: bytes, balance, predicted time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import qkv
from qkv.arguments.declarations import Positive, Size, checked
from qkv.cost.cards import model_card
from qkv.cost.machines import bytes_of
from qkv.cost.machines import machine as machine_of
from qkv.cost.model import Attention, Model
from qkv.errors import ArgumentError

if TYPE_CHECKING:
    from qkv.distributed import DistributedPlan, Order

__all__ = ["KERNEL_SHARE", "RanksCost", "SpreadCost", "ranks_cost"]

KERNEL_SHARE = 0.6
"""The share of a machine's peak that a fused attention kernel is assumed to reach."""

_MOST_RANKS = 4096
"""The most ranks: the work of each pair of ranks is kept."""

_DTYPES = {2: "float16", 4: "float32", 8: "float64"}


@dataclass(frozen=True, slots=True)
class SpreadCost:
    """All attention layers of a model, forward, by one strategy of `qkv.distributed`.

    Attributes
    ----------
    refusal : str
        Why it cannot be used; empty if it can.
    received : int
        Bytes that the rank which receives most receives in all layers.
    held : int
        Bytes of keys and values that one rank holds at a time, in the layer that needs most.
    balance : float
        Largest over mean work, in the layer where it is worst.
    seconds : float
        Predicted, of all layers.
    efficiency : float
        The time with even work and no messages, over the predicted one.

    Examples
    --------
    >>> from qkv.cost import ranks_cost
    >>> ranks_cost("gpt-2", ranks=5).strategies["ulysses"].refusal
    '12 query heads cannot be shared out evenly to 5 ranks.'
    """

    refusal: str = ""
    received: int = 0
    held: int = 0
    balance: float = 1.0
    seconds: float = 0.0
    efficiency: float = 0.0


@dataclass(frozen=True, slots=True)
class RanksCost:
    """What `ranks_cost` gives.

    Attributes
    ----------
    model : Model
    context, batch, ranks : int
    dtype, machine, order : str
    operations_per_second : float
        Of the attention kernel on one rank.
    strategies : mapping of str to SpreadCost
        "ring", "gather" and "ulysses".

    Examples
    --------
    >>> from qkv.cost import ranks_cost
    >>> cost = ranks_cost("gpt-2", ranks=2)
    >>> cost.context, cost.ranks, cost.order
    (1024, 2, 'zigzag')
    """

    model: Model
    context: int
    batch: int
    ranks: int
    dtype: str
    machine: str
    order: str
    operations_per_second: float
    strategies: Mapping[str, SpreadCost]

    def __repr__(self) -> str:
        took = [
            f"{name} refused" if of.refusal else f"{name} {of.seconds:.3g} s"
            for name, of in self.strategies.items()
        ]
        return (
            f"RanksCost({self.model.name!r}, {self.context:,} tokens, batch {self.batch}, "
            f"{self.dtype}, {self.ranks} ranks in {self.order} order: {', '.join(took)})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything for JSON."""
        names = ("context", "batch", "ranks", "dtype", "machine", "order", "operations_per_second")
        return {
            "model": self.model.name,
            **{name: getattr(self, name) for name in names},
            "strategies": {name: asdict(of) for name, of in self.strategies.items()},
        }


@checked
def ranks_cost(
    model: Model | str,
    context: Size | None = None,
    ranks: Size = 2,
    *,
    batch: Size = 1,
    dtype: str = "bfloat16",
    machine: str = "h100",
    link_bandwidth: Positive = 5e10,
    link_latency: Positive = 1e-5,
    order: Literal["zigzag", "contiguous", "striped"] = "zigzag",
) -> RanksCost:
    """The attention of one forward pass of a model whose sequence is spread over ranks.

        seconds = sum over steps of max(work / operations_per_second, latency + bytes / bandwidth)

    for a ring; gathering keys and all-to-all do not overlap with computing.

    Parameters
    ----------
    model : Model or str
        A model of one sequence, or its name.
    context : int, optional
        Tokens of the whole sequence; the model's unless given.
    ranks, batch : int
    dtype : str
        "bfloat16", "float16", "float32" or "float64".
    machine : str
        A name of `qkv.cost.machine`; a rank computes at 0.6 of its peak, as fused kernels do. Or
        "here", which measures the kernel of this machine.
    link_bandwidth : float
        Bytes a second that one rank receives.
    link_latency : float
        Seconds from the request of a message to its first byte.
    order : "zigzag", "contiguous" or "striped"
        Which tokens each rank holds.

    Returns
    -------
    RanksCost

    Raises
    ------
    ArgumentError
        If a name is unknown, or the model reads two sequences.

    Notes
    -----
    It counts the pairs that masks allow, by tiles. It stops being true where parts become so small
    that a kernel does not reach its rate (below some 1,000 rows on a rank), where ranks share a
    link, and where other layers wait for the same memory.

    Examples
    --------
    >>> from qkv.cost import ranks_cost
    >>> cost = ranks_cost("llama-3-8b", 1_000_000, 64)
    >>> ring, gather = cost.strategies["ring"], cost.strategies["gather"]
    >>> ring.held < gather.held, ring.received == gather.received
    (True, True)
    """
    model = model_card(model) if isinstance(model, str) else model
    if model.encoder is not None:
        raise ArgumentError(
            f"{model.name} reads two sequences.", action="Name a model that reads one."
        )
    from qkv.distributed import Order

    context = model.context if context is None else context
    if ranks > min(context, _MOST_RANKS):
        raise ArgumentError(
            f"{context:,} tokens are not spread over {ranks:,} ranks.",
            [("most ranks", f"one for each token, and {_MOST_RANKS:,}")],
            "Name fewer ranks, or a longer context.",
        )
    item = bytes_of(dtype)
    if item not in _DTYPES:
        raise ArgumentError(
            f"qkv.distributed does not compute in {dtype}.",
            action="Use bfloat16, float16, float32 or float64.",
        )
    rate, name = _rate(machine, dtype)
    rows = getattr(Order, order)(context, ranks)
    links = rate, link_bandwidth, link_latency
    kinds = Counter(layer.attention for layer in model.layers)
    plans = [(n, _planned(kind, rows, batch, item, links)) for kind, n in kinds.items()]
    alone = Order.contiguous(context, 1)
    whole = [_planned(kind, alone, batch, item, links).strategies["ring"].seconds for kind in kinds]
    ideal = sum(n * s for n, s in zip(kinds.values(), whole, strict=True)) / ranks
    strategies = {name: _in_all(name, plans, ideal) for name in plans[0][1].strategies}
    return RanksCost(model, context, batch, ranks, dtype, name, order, rate, strategies)


def _in_all(name: str, plans: list[tuple[int, DistributedPlan]], ideal: float) -> SpreadCost:
    """One strategy in all layers."""
    layers = [(count, plan.strategies[name]) for count, plan in plans]
    refusal = next((of.refusal for _, of in layers if of.refusal), "")
    if refusal:
        return SpreadCost(refusal)
    seconds = sum(count * of.seconds for count, of in layers)
    return SpreadCost(
        received=sum(count * of.bytes_per_link for count, of in layers),
        held=max(of.key_bytes for _, of in layers),
        balance=max(of.balance for _, of in layers),
        seconds=seconds,
        efficiency=ideal / seconds,
    )


def _planned(
    attention: Attention, order: Order, batch: int, item: int, links: tuple[float, float, float]
) -> DistributedPlan:
    from qkv.distributed import Machine, plan

    def rows(heads: int, dim: int) -> Any:
        return np.broadcast_to(np.zeros((), _DTYPES[item]), (batch, heads, order.length, dim))

    masks: list[Any] = [qkv.Causal()] if attention.causal else []
    if attention.window is not None:
        behind = attention.window - 1 if attention.causal else attention.window // 2
        masks.append(qkv.SlidingWindow(behind, 0 if attention.causal else behind))
    return plan(
        rows(attention.num_heads, attention.head_dim),
        rows(attention.num_kv_heads, attention.head_dim),
        rows(attention.num_kv_heads, attention.v_head_dim),
        *masks, ranks=order.ranks, order=order, machine=Machine(*links),
    )  # fmt: skip


def _rate(name: str, dtype: str) -> tuple[float, str]:
    """Operations a second of the attention kernel on one rank, and the machine's name."""
    if name == "here":
        return _measured_rate(dtype, qkv.get_num_threads()), "here"
    machine = machine_of(name)
    if dtype not in machine.peak:
        raise ArgumentError(
            f"{machine.name} has no peak for {dtype}.", action=f"Use {', '.join(machine.peak)}."
        )
    return KERNEL_SHARE * machine.peak[dtype], machine.name


@cache
def _measured_rate(dtype: str, threads: int) -> float:
    """The operations a second of `qkv.attention` of 2,048 tokens on this machine.

    It runs with the threads of this process.
    """
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    rng = np.random.default_rng(0)
    shape = 1, max(2, threads), 2048, 64
    q, k, v = (rng.normal(size=shape).astype(kind) for _ in range(3))
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        qkv.attention(q, k, v)
        seconds.append(time.perf_counter() - began)
    return float(4 * np.prod(shape) * shape[2] / min(seconds))
