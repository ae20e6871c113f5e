"""What ranks of a ring send: the runs of keys that a query of the reader sees, as the plan says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import qkv

LENGTH, HEADS, KV_HEADS, DIM = 64, 4, 2, 8
DOCUMENTS = np.repeat(np.arange(4), 16)
MASKS = {
    "plain": ((), lambda i, j: True),
    "causal": ((qkv.Causal(),), lambda i, j: j <= i),
    "window": ((qkv.SlidingWindow(left=9, right=0),), lambda i, j: 0 <= i - j <= 9),
    "documents": (
        (qkv.Segments(DOCUMENTS, DOCUMENTS),), lambda i, j: DOCUMENTS[i] == DOCUMENTS[j]
    ),
}  # fmt: skip


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Bytes of each message of keys and values, or of their gradients, that this rank receives."""
    from qkv.distributed.messages.links import Links

    sizes: list[int] = []
    exchange = Links.exchange

    def counting(links: Links, sends: Any, receives: Any) -> Any:
        sides = [of for of in receives.values() if isinstance(of, tuple)]
        sizes.extend(sum(t.nbytes for t in of) for of in sides)
        return exchange(links, sends, receives)

    Links.exchange = counting  # type: ignore[method-assign]  # for this block alone
    try:
        yield sizes
    finally:
        Links.exchange = exchange  # type: ignore[method-assign]


def receive(rank: int, ranks: int, name: str, order_name: str) -> dict[str, Any]:
    """Bytes that this rank receives forward, and with the backward pass; and all ranks' plan."""
    from qkv.distributed import Order, attention, plan

    variants, _ = MASKS[name]
    order = getattr(Order, order_name)(LENGTH, ranks)
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(1, h, LENGTH, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS)
    ]
    shards = [order.shard(t, rank).requires_grad_() for t in whole]
    with counted_bytes() as sizes:
        out = attention(*shards, *variants, order=order, strategy="ring")
        forward = sum(sizes)
        torch.autograd.grad(out.sum(), shards)
    planned = plan(*whole, *variants, ranks=ranks, order=order).strategies["ring"]
    return {"forward": forward, "all": sum(sizes), "plan": planned.bytes_per_link}


def needed_rows(order: Any, reader: int, owner: int, allowed: Any) -> int:
    """Rows of an owner's runs of which a query of the reader sees one, counted pair by pair."""
    queries = order.position_ids(reader)
    return sum(
        len(run) for run in order.runs[owner] if any(allowed(i, j) for i in queries for j in run)
    )


@pytest.mark.parametrize("order_name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.one_in(2)
def test_runs_that_the_reader_needs(group: Any, name: str, order_name: str) -> None:
    from qkv.distributed import Order

    ranks = 4
    order, allowed = getattr(Order, order_name)(LENGTH, ranks), MASKS[name][1]
    answers = group(ranks)(receive, name, order_name)
    row = KV_HEADS * 2 * DIM * 4
    rows = np.array([
        [needed_rows(order, r, o, allowed) if r != o else 0 for o in range(ranks)]
        for r in range(ranks)
    ])  # fmt: skip
    assert [of["forward"] for of in answers] == (rows.sum(axis=1) * row).tolist()
    # The backward pass receives the keys again, and gradients of own keys from whoever had them.
    both = 2 * rows.sum(axis=1) + rows.sum(axis=0)
    assert [of["all"] for of in answers] == (both * row).tolist()
    assert {of["plan"] for of in answers} == {rows.sum(axis=1).max() * row}


def refuse(rank: int, ranks: int) -> tuple[str, int]:
    """What is said of a call that drops weights, and how many keys this rank asked for by then."""
    from qkv.distributed import attention

    q = torch.ones(1, HEADS, LENGTH // ranks, DIM)
    said = ""
    with counted_bytes() as sizes:
        try:
            attention(q, q, q, qkv.Dropout(0.1, seed=1), strategy="ring")
        except qkv.UnsupportedError as error:
            said = str(error)
    return said, len(sizes)


def test_nothing_is_sent_of_a_call_that_is_refused(group: Any) -> None:
    for said, asked in group(2)(refuse):
        assert "Dropout numbers the rows of a whole problem" in said
        assert asked == 0
