"""Orders, and the balance of work that they give, counted from masks pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.distributed import Order, balanced, plan
from qkv.distributed.orders.heads import kv_heads_of

LENGTH = 4096


def packed(seed: int, documents: int) -> np.ndarray[Any, Any]:
    """Ids of documents of random lengths that fill a sequence."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, LENGTH), documents - 1, replace=False))
    return np.repeat(np.arange(documents), np.diff([0, *cuts, LENGTH]))


LAYOUTS: dict[str, tuple[Any, ...]] = {
    "causal": (qkv.Causal(),),
    "few documents": (qkv.Causal(), qkv.Segments(packed(1, 5))),
    "many documents": (qkv.Causal(), qkv.Segments(packed(2, 60))),
    "one long document": (
        qkv.Causal(),
        qkv.Segments(np.r_[np.zeros(3000, int), 1 + np.arange(LENGTH - 3000) // 64]),
    ),
}


def pairs_of_rows(name: str) -> np.ndarray[Any, Any]:
    """How many keys each query sees, counted from the definition."""
    rows = np.arange(LENGTH)
    if name == "causal":
        return rows + 1
    ids = np.asarray(LAYOUTS[name][1].q_ids)
    first = np.searchsorted(ids, ids)  # ids rise
    return rows - first + 1


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_balanced_orders_share_work_out_within_five_percent(name: str, ranks: int) -> None:
    work = pairs_of_rows(name)
    order = balanced(LENGTH, ranks, *LAYOUTS[name])
    of_ranks = np.array([work[order.position_ids(rank)].sum() for rank in range(ranks)])
    rows = [order.rows(rank) for rank in range(ranks)]
    assert max(rows) - min(rows) <= 32
    assert of_ranks.max() / of_ranks.mean() <= 1.05


@pytest.mark.parametrize("length", [0, 1, 7, 24])
@pytest.mark.parametrize("make", [Order.contiguous, Order.zigzag, Order.striped])
def test_shards_hold_every_row_once(make: Any, length: int) -> None:
    order = make(length, 3)
    array = np.arange(length * 2.0).reshape(length, 2)
    shards = [order.shard(array, rank) for rank in range(3)]
    np.testing.assert_array_equal(order.unshard(shards), array)
    tensor = torch.from_numpy(array)
    for rank, shard in enumerate(shards):
        assert torch.equal(order.shard(tensor, rank), torch.from_numpy(shard))
        np.testing.assert_array_equal(order.shard(np.arange(length), rank, -1), shard[:, 0] // 2)


def test_wrong_orders_are_refused() -> None:
    with pytest.raises(qkv.ArgumentError, match="1 of 4 rows are not held by exactly one rank"):
        Order("own", 4, ((range(2),), (range(1, 4),)))
    with pytest.raises(qkv.ArgumentError, match="reaches beyond a sequence of 4 rows"):
        Order("own", 4, ((range(5),),))
    with pytest.raises(qkv.ShapeError, match="the array has 5 rows along axis -2"):
        Order.zigzag(4, 2).shard(np.zeros((5, 2)), 0)


def test_the_plan_counts_what_is_sent() -> None:
    shape = (1, 8, LENGTH, 64)
    x = np.broadcast_to(np.float32(0), shape)
    found = plan(x, x, x, qkv.SlidingWindow(100, 0), ranks=8)
    ring = found.strategies["ring"]
    row = 8 * (64 + 64) * 4
    assert ring.bytes_per_link == LENGTH // 8 * row  # a window reaches into one neighbour only
    assert ring.skipped == 64 - 8 - 7
    assert found.strategies["gather"].bytes_per_link == LENGTH * 7 // 8 * row
    assert ring.balance == pytest.approx(1.0, abs=0.15)
    causal = plan(x, x, x, qkv.Causal(), ranks=8).strategies["ring"]
    assert causal.balance == pytest.approx(15 / 8, rel=0.02)
    assert "ring" in str(found)
    grouped = np.broadcast_to(np.float32(0), (1, 3, LENGTH, 64))
    refused = plan(x[:, :3], grouped, grouped, ranks=8).strategies["ulysses"]
    assert "3 query heads cannot be shared out evenly to 8 ranks" in refused.refusal


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 3)])
def test_heads_are_left_whole_along_one_dimension(num_heads: int, num_kv_heads: int) -> None:
    """A mesh of two dimensions shares heads out, whatever the strategy."""
    with pytest.raises(qkv.UnsupportedError, match='"gather" along one dimension'):
        kv_heads_of(num_heads, num_kv_heads, 2, 0)
