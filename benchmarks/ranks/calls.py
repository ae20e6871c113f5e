"""What each rank does, and what it takes; all of it runs in the processes of ranks."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import qkv
from qkv.distributed import Order, attention
from qkv.distributed.messages.links import Links, group_of

__all__ = [
    "HEADS",
    "HEAD_DIM",
    "MESSAGE",
    "STRATEGIES",
    "Tensors",
    "inputs",
    "link",
    "memory_of_rank",
    "now",
    "once",
    "over_ranks",
    "over_ranks_of_torch",
]

HEADS, HEAD_DIM = 4, 64
STRATEGIES = ("ring", "gather", "ulysses")
MESSAGE = 2**24
"""Bytes of the message that measures a link."""

Tensors = tuple[torch.Tensor, ...]


def inputs(length: int) -> Tensors:
    """Query, key, value and a cotangent of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, HEADS, length, HEAD_DIM
    return tuple(torch.randn(shape, generator=generator) for _ in range(4))


def once(call: Callable[[], torch.Tensor], leaves: Tensors, cotangent: torch.Tensor | None) -> Any:
    """The output, and gradients of the leaves where there is a cotangent."""
    if cotangent is None:
        with torch.no_grad():
            return [call()]
    out = call()
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def now() -> Any:
    """Seconds by the clock, and of this process's processor, of all its threads."""
    return np.array([time.perf_counter(), time.process_time()])


def over_ranks(rank: int, ranks: int, length: int, strategy: str, backward: bool) -> Any:
    """Seconds of one call on this rank, by the clock and of its processor, and its rows of it."""
    order = Order.zigzag(length, ranks)
    *leaves, cotangent = (order.shard(x, rank) for x in inputs(length))
    for leaf in leaves:
        leaf.requires_grad_(backward)
    dist.barrier()
    began = now()
    found = once(
        lambda: attention(*leaves, qkv.Causal(), order=order, strategy=strategy),
        tuple(leaves),
        cotangent if backward else None,
    )
    return now() - began, [x.numpy() for x in found]


def memory_of_rank(
    rank: int, ranks: int, length: int, strategy: str, backward: bool
) -> tuple[int, int]:
    """Bytes of this rank's shards, and the most that it holds beside them during a call."""
    order = Order.zigzag(length, ranks)
    *leaves, cotangent = (order.shard(x, rank).clone() for x in inputs(length))
    for leaf in leaves:
        leaf.requires_grad_(backward)
    dist.barrier()
    ctypes.CDLL(None).malloc_trim(0)  # What was freed goes back to the system, so that it counts.
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before = _resident("VmRSS")
    once(
        lambda: attention(*leaves, qkv.Causal(), order=order, strategy=strategy),
        tuple(leaves),
        cotangent if backward else None,
    )
    held = [*leaves, cotangent] if backward else leaves
    return sum(x.nbytes for x in held), _resident("VmHWM") - before


def _resident(name: str) -> int:
    """Bytes of memory that this process has (VmRSS), or had at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def over_ranks_of_torch(rank: int, ranks: int, length: int, backward: bool) -> Any:
    """The same by `context_parallel` of torch, which shards in a balanced order of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    mesh = init_device_mesh("cpu", (ranks,))
    *leaves, cotangent = inputs(length)
    with context_parallel(mesh, buffers=[*leaves, cotangent], buffer_seq_dims=[2] * 4):
        # Other tensors of the same memory, since those that are sharded must not need gradients.
        a, b, c = own = tuple(leaf.view_as(leaf).requires_grad_(backward) for leaf in leaves)
        dist.barrier()
        began = now()
        found = once(
            lambda: torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True),
            own,
            cotangent if backward else None,
        )
        seconds = now() - began
        whole = context_parallel_unshard(mesh, [found[0].contiguous()], [2])
    return seconds, [x.numpy() for x in whole]


def link(rank: int, ranks: int) -> tuple[float, float]:
    """Bytes a second that two ranks send to each other at once, and seconds of a small message."""
    links, peer = Links(group_of(None, None)), 1 - rank
    least = []
    for size in (1, MESSAGE):
        sent, found = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
        seconds = []
        for _ in range(10):
            dist.barrier()
            began = time.perf_counter()
            links.exchange({peer: sent}, {peer: found}).wait()
            seconds.append(time.perf_counter() - began)
        least.append(min(seconds))
    return MESSAGE / max(least[1] - least[0], 1e-9), least[0]
