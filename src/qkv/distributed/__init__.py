"""Attention over many machines, on torch.distributed.

attention, decode   the public functions
plan                bytes, steps, balance and predicted time of each strategy
orders              which rows each rank holds; orders that share work out evenly
calls               one call: what ranks agree on, its parts, its gradient, ring and all-to-all
messages            messages with errors that name the rank
inspection          statistics of weights that no rank holds, and scores of heads
"""

from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING

from qkv.distributed.orders.order import Order
from qkv.distributed.orders.work import balanced
from qkv.distributed.plan import DistributedPlan, Machine, StrategyPlan, plan
from qkv.extras import missing as _missing

if _TYPE_CHECKING or _find_spec("torch") is not None:
    from qkv.distributed.attention import attention, inspect
    from qkv.distributed.decode import decode
    from qkv.distributed.inspection.record import DistributedRecord

__all__ = [
    "DistributedPlan",
    "DistributedRecord",
    "Machine",
    "Order",
    "StrategyPlan",
    "attention",
    "balanced",
    "decode",
    "inspect",
    "plan",
]


def __getattr__(name: str) -> object:
    """Orders and plans are arithmetic on sizes. Only what sends messages needs torch."""
    if name in __all__:
        raise _missing(f"qkv.distributed.{name}", "torch", "torch")
    raise AttributeError(f"module 'qkv.distributed' has no attribute {name!r}")
