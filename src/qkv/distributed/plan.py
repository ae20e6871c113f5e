"""What each way of spreading a call over ranks sends and takes, before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import checked as checked_arguments
from qkv.call.binding.options import Options, option_values, with_options
from qkv.call.dispatch import checked
from qkv.distributed.orders.heads import kv_heads_of
from qkv.distributed.orders.order import Order
from qkv.distributed.orders.work import balance, pairs_between
from qkv.errors import ArgumentError, UnsupportedError
from qkv.ledger import memory
from qkv.problem.spec import Problem

__all__ = ["STRATEGIES", "DistributedPlan", "Machine", "StrategyPlan", "choose_strategy", "plan"]

Array = NDArray[Any]

STRATEGIES = ("ring", "gather", "ulysses")


@dataclass(frozen=True, slots=True)
class Machine:
    """What one rank computes and sends in a second.

    Attributes
    ----------
    operations_per_second : float
        Floating operations of the attention kernel on one rank, a multiply and an add as two.
    bytes_per_second : float
        What one rank sends, and receives, at a time.
    latency : float
        Seconds from the request of a message to its first byte.
    """

    operations_per_second: float = 1e11
    bytes_per_second: float = 1e9
    latency: float = 2e-4


@dataclass(frozen=True, slots=True)
class StrategyPlan:
    """One strategy, forward.

    Attributes
    ----------
    refusal : str
        Why it cannot be used; empty if it can.
    bytes_per_link : int
        What the rank that receives most receives.
    steps : int
        Steps that are computed by the rank with most of them.
    skipped : int
        Steps of all ranks that the mask forbids; they are neither computed nor sent.
    balance : float
        Largest over mean work of the ranks.
    key_bytes : int
        Keys and values that one rank holds at a time.
    seconds : float
        Predicted, on the machine of the plan.
    """

    refusal: str = ""
    bytes_per_link: int = 0
    steps: int = 0
    skipped: int = 0
    balance: float = 1.0
    key_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DistributedPlan:
    """All strategies of one call, as `qkv.distributed.plan` gives them.

    Attributes
    ----------
    strategies : mapping of str to StrategyPlan
    strategy : str
        The one that "auto" takes: the quickest.
    reason : str
        Why, in one sentence.
    ranks : int
    order : str
    """

    strategies: Mapping[str, StrategyPlan]
    strategy: str
    reason: str
    ranks: int
    order: str

    def __str__(self) -> str:
        lines = [f"{self.ranks} ranks, {self.order} order: {self.strategy}, {self.reason}"]
        lines.append(
            f"{'':9}{'received':>12}{'held':>12}{'steps':>7}{'skipped':>9}{'balance':>9}{'ms':>11}"
        )
        for name, of in self.strategies.items():
            if of.refusal:
                lines.append(f"{name:9}{of.refusal}")
                continue
            lines.append(
                f"{name:9}{memory(of.bytes_per_link):>12}{memory(of.key_bytes):>12}{of.steps:>7}"
                f"{of.skipped:>9}{of.balance:>9.3f}{1e3 * of.seconds:>11.3f}"
            )
        return "\n".join(lines)


@partial(with_options, name="distributed.plan")
@checked_arguments
def plan(
    query: Any,
    key: Any,
    value: Any,
    *variants: Any,
    ranks: int = 2,
    order: Order | None = None,
    kv_order: Order | None = None,
    machine: Machine | None = None,
    **options: Unpack[Options],
) -> DistributedPlan:
    """Say what each strategy of `qkv.distributed.attention` would send and take; nothing is sent.

    Parameters
    ----------
    query, key, value : array (..., heads, length, dim)
        Of the *whole* sequence. Their values are not read, so that arrays without memory will do:
        `np.broadcast_to(np.float32(0), shape)`.
    *variants, scale, layout, q_offset, kv_offset, backend
        As for `qkv.attention`.
    ranks : int
    order, kv_order : Order, optional
        Neighbouring rows in the order of ranks, unless given.
    machine : Machine, optional
        What a rank computes and sends in a second; modest numbers for CPUs unless given.

    Returns
    -------
    DistributedPlan
        `.strategies`, `.strategy`, `.reason`; `str()` of it is a table.

    Raises
    ------
    QkvError
        As `qkv.attention` does; ArgumentError if an order does not fit.

    Notes
    -----
    The time of a ring is the sum over its steps of the larger of computing and receiving, for the
    slowest rank; gathering and all-to-all do not overlap with computing. It takes no account of
    ranks that share a link, nor of calls so small that they do not reach the machine's rate.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.broadcast_to(np.float32(0), (1, 8, 65536, 64))
    >>> order = qkv.distributed.Order.zigzag(65536, 8)
    >>> plan = qkv.distributed.plan(x, x, x, qkv.Causal(), ranks=8, order=order)
    >>> plan.strategies["ring"].steps, round(plan.strategies["ring"].balance, 2)
    (8, 1.0)
    """
    call = checked(query, key, value, variants, option_values("distributed.plan", options))
    spec = call.problem.spec
    queries = Order.contiguous(spec.q_len, ranks) if order is None else order
    if kv_order is None:
        same = order is not None and spec.q_len == spec.kv_len
        kv_order = queries if same else Order.contiguous(spec.kv_len, ranks)
    for side, length in ((queries, spec.q_len), (kv_order, spec.kv_len)):
        if side.length != length or side.ranks != ranks:
            raise ArgumentError(
                f"an order of {side.length} rows on {side.ranks} ranks does not fit {length} rows "
                f"on {ranks} ranks.",
                action="Make the order for the length and the number of ranks.",
            )
    return _planned(call.problem, queries, kv_order, Machine() if machine is None else machine)


def choose_strategy(problem: Problem, queries: Order, keys: Order, *, two: bool) -> str:
    """The strategy that "auto" takes; with two dimensions of a mesh, of those for the first."""
    predicted = _planned(problem, queries, keys, Machine())
    if not two:
        return predicted.strategy
    return min(("ring", "gather"), key=lambda name: predicted.strategies[name].seconds)


def _planned(problem: Problem, queries: Order, keys: Order, machine: Machine) -> DistributedPlan:
    spec = problem.spec
    pairs, needed_rows = pairs_between(problem, queries, keys)
    work = pairs * 2 * (spec.head_dim + spec.v_head_dim)
    rows = np.array([keys.rows(rank) for rank in range(keys.ranks)])
    item = problem.operands.query.itemsize
    row_bytes = spec.batch_size * spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * item
    sizes = rows * row_bytes
    strategies = {
        "ring": _ring(work, sizes, needed_rows * row_bytes, machine),
        "gather": _gather(work, sizes, machine),
        "ulysses": _ulysses(problem, work, queries, sizes, machine),
    }
    able = [name for name in strategies if not strategies[name].refusal]
    best = min(able, key=lambda name: strategies[name].seconds)
    others = [f"{name} {1e3 * strategies[name].seconds:.3g} ms" for name in able if name != best]
    reason = f"predicted {1e3 * strategies[best].seconds:.3g} ms ({', '.join(others)})"
    return DistributedPlan(strategies, best, reason, queries.ranks, queries.name)


def _ring(work: Array, sizes: Array, sent: Array, machine: Machine) -> StrategyPlan:
    """A ring, on which each rank is sent so many bytes of each other's keys."""
    ranks = len(sizes)
    rank = np.arange(ranks)
    needed = work > 0
    owners = [(rank - step) % ranks for step in range(ranks)]
    compute = np.array([work[rank, owner] for owner in owners]) / machine.operations_per_second
    seconds = np.where(needed, machine.latency + sent / machine.bytes_per_second, 0.0)
    arrive = np.array([seconds[rank, owner] for owner in owners[1:]]).reshape(ranks - 1, ranks)
    overlapped = np.maximum(compute[:-1], arrive).sum(axis=0) + compute[-1]
    others = ~np.eye(ranks, dtype=bool)
    return StrategyPlan(
        bytes_per_link=int((others * sent).sum(axis=1).max()),
        steps=int(needed.sum(axis=1).max()),
        skipped=int((~needed).sum()),
        balance=balance(work),
        key_bytes=int(sizes.max()) * min(3, ranks),
        seconds=float(overlapped.max()),
    )


def _gather(work: Array, sizes: Array, machine: Machine) -> StrategyPlan:
    ranks = len(sizes)
    received = sizes.sum() - sizes
    compute = work.sum(axis=1) / machine.operations_per_second
    wait = machine.latency * (ranks > 1) + received / machine.bytes_per_second
    return StrategyPlan(
        bytes_per_link=int(received.max()),
        steps=1,
        balance=balance(work),
        key_bytes=int(sizes.sum()) * (2 if ranks > 1 else 1),
        seconds=float((compute + wait).max()),
    )


def _ulysses(
    problem: Problem, work: Array, queries: Order, sizes: Array, machine: Machine
) -> StrategyPlan:
    spec, ranks = problem.spec, queries.ranks
    try:
        shares = [kv_heads_of(spec.num_heads, spec.num_kv_heads, ranks, r) for r in range(ranks)]
    except UnsupportedError as error:
        return StrategyPlan(refusal=error.fact)
    item = problem.operands.query.itemsize
    widest = max(map(len, shares)) / spec.num_kv_heads
    rows = max(queries.rows(rank) for rank in range(ranks))
    of_queries = spec.batch_size * spec.num_heads * rows * (spec.head_dim + spec.v_head_dim) * item
    others = (ranks - 1) / ranks
    received = int(of_queries * others + (sizes.sum() - sizes.min()) * widest)
    compute = work.sum() / ranks / machine.operations_per_second
    messages = 3 * machine.latency if ranks > 1 else 0.0
    return StrategyPlan(
        bytes_per_link=received,
        steps=1,
        key_bytes=int(sizes.sum() * widest) * 2,
        seconds=float(compute + messages + received / machine.bytes_per_second),
    )
