"""Attention over many machines, on torch.distributed.

attention, decode   the public functions
plan                bytes, steps, balance and predicted time of each strategy
orders              which rows each rank holds; orders that share work out evenly
calls               one call: what ranks agree on, its parts, its gradient, ring and all-to-all
messages            messages with errors that name the rank
inspection          statistics of weights that no rank holds, and scores of heads
"""

from qkv.distributed.attention import attention, inspect
from qkv.distributed.decode import decode
from qkv.distributed.inspection.record import DistributedRecord
from qkv.distributed.orders.order import Order
from qkv.distributed.orders.work import balanced
from qkv.distributed.plan import DistributedPlan, Machine, StrategyPlan, plan

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
