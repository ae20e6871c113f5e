"""How evenly orders share out the work of masks: `python -m benchmarks.ranks balance`.

Work of a rank is the number of pairs of a query and a key that its rows may see, counted for each
row from the definition of the mask. 1.00 is even; with a rank that has twice the mean, everybody
waits for it, and half of the time is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor.experimental._context_parallel import _load_balancer
from torch.nn.attention.flex_attention import create_block_mask

import qkv
from qkv.distributed import Order, balanced

__all__ = ["balance"]

RANKS = (8, 64)
Array = NDArray[np.int64]


def balance(length: int, seed: int = 0) -> None:
    """Print the largest over the mean work of ranks, for each mask and order."""
    print(f"largest over mean work of ranks, {length:,} tokens, masks with causal documents")
    print(f"{'documents':28}{'order':36}" + "".join(f"{f'{n} ranks':>10}" for n in RANKS))
    for name, ids in documents(length, seed).items():
        rows = np.arange(length)
        first = np.searchsorted(ids, ids)  # Ids rise.
        work = rows - first + 1
        for order in _orders(ids, RANKS[0]):
            found = []
            for ranks in RANKS:
                try:
                    of_rank = [work[held].sum() for held in _orders(ids, ranks)[order]()]
                    found.append(f"{max(of_rank) / np.mean(of_rank):.2f}")
                except (AssertionError, NotImplementedError, ValueError):
                    found.append("refused")
            print(f"{name:28}{order:36}" + "".join(f"{each:>10}" for each in found), flush=True)


def documents(length: int, seed: int = 0) -> dict[str, Array]:
    """The number of each row's document in some packed sequences, by their names."""
    rng = np.random.default_rng(seed)

    def packed(count: int) -> Array:
        cuts = np.sort(rng.choice(np.arange(1, length), count - 1, replace=False))
        return np.repeat(np.arange(count), np.diff([0, *cuts, length]))

    long = length * 3 // 4
    return {
        "one": np.zeros(length, np.int64),
        "5 of random lengths": packed(5),
        "60 of random lengths": packed(60),
        "a long one, then short ones": np.r_[
            np.zeros(long, np.int64), 1 + np.arange(length - long) // 64
        ],
    }


def _orders(ids: Array, ranks: int) -> dict[str, Any]:
    """A function for each order, which gives the rows of each rank."""
    length = len(ids)

    def ours(order: Order) -> Iterator[Array]:
        return (order.position_ids(rank) for rank in range(ranks))

    def of_torch(balancer: Any) -> Iterator[Array]:
        rows = balancer._generate_indices()
        return iter(rows.reshape(ranks, -1).numpy())

    def of_blocks() -> Iterator[Array]:
        owner = torch.from_numpy(ids)
        mask = create_block_mask(
            lambda b, h, q, k: (q >= k) & (owner[q] == owner[k]), None, None, length, length, "cpu"
        )
        return of_torch(_load_balancer._PTRRLoadBalancer(mask, ranks))

    def by_document() -> Iterator[Array]:
        sizes = [np.bincount(ids).tolist()]
        return of_torch(_load_balancer._PerDocumentHeadTailLoadBalancer(sizes, ranks, "cpu"))

    return {
        "contiguous": lambda: ours(Order.contiguous(length, ranks)),
        "striped": lambda: ours(Order.striped(length, ranks)),
        "zigzag (torch: head and tail)": lambda: ours(Order.zigzag(length, ranks)),
        "torch: by document": by_document,
        "torch: blocks, in turns (PTRR)": of_blocks,
        "qkv.distributed.balanced": lambda: ours(
            balanced(length, ranks, qkv.Causal(), qkv.Segments(ids))
        ),
    }
