"""One rank on a host of its own: `python -m tests.distributed.on_a_host RANK ADDRESS`.

It makes a call, says how far the result is from that of one process, waits for a line, and makes
the call again.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import qkv
from qkv.distributed import Order, attention
from tests.distributed.cases import LENGTH, operands

TIMEOUT = 4.0


def main() -> None:
    rank, address = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    order = Order.zigzag(LENGTH, 2)
    whole = [t.float() for t in operands()[:3]]
    shards = [order.shard(t, rank) for t in whole]
    out = attention(*shards, qkv.Causal(), order=order, strategy="ring")
    k, v = (t.repeat_interleave(2, dim=1) for t in whole[1:])
    right = torch.nn.functional.scaled_dot_product_attention(whole[0], k, v, is_causal=True)
    print(float((out - order.shard(right, rank)).abs().max()), flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    try:
        attention(*shards, qkv.Causal(), order=order, strategy="ring", timeout=TIMEOUT)
        print("no error", flush=True)
    except qkv.DistributedError as error:
        print(f"{time.monotonic() - began:.1f} s: {error.fact}", flush=True)


if __name__ == "__main__":
    main()
