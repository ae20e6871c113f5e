"""Attention over many machines, on torch.distributed.

| module | holds |
|---|---|
| `attention.py`, `decode.py` | the public functions |
| `agreed_call.py` | the call that all ranks make, after they compared what each was given |
| `order.py`, `work.py` | which rows each rank holds; orders that share work out evenly |
| `plan.py` | bytes, steps, balance and predicted time of each strategy |
| `sharded_call.py` | one call on one rank, and its gradient |
| `ring.py`, `heads.py` | keys that travel or are gathered; all-to-all over heads (Ulysses) |
| `record.py`, `head_scores.py` | statistics of weights that no rank holds, and scores of heads |
| `parts.py` | what a rank computes: parts of the problem, and how they merge |
| `links.py`, `agreement.py` | messages with errors that name the rank; what ranks tell each other |
| `dtensors.py`, `arrays.py` | shards as tensors or DTensors; rows of arrays of any library |
"""

from qkv.distributed.attention import attention, inspect
from qkv.distributed.decode import decode
from qkv.distributed.order import Order
from qkv.distributed.plan import DistributedPlan, Machine, StrategyPlan, plan
from qkv.distributed.record import DistributedRecord
from qkv.distributed.work import balanced

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
