"""Attention over ranks is attention, for every strategy, order and variant, with its gradients."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch

import qkv
from tests.distributed.cases import CASES, HEADS, LENGTH, draw, expected, operands

ORDERS = ("contiguous", "zigzag", "striped", "balanced")


def order_of(name: str, ranks: int, variants: Any) -> Any:
    from qkv.distributed import Order, balanced

    if name == "balanced":
        return balanced(LENGTH, ranks, *variants, num_heads=HEADS)
    return getattr(Order, name)(LENGTH, ranks)


def run_case(
    rank: int, ranks: int, name: str, strategy: str, order_name: str, dtype: torch.dtype,
    layout: str = "bhld",
) -> dict[str, Any]:  # fmt: skip
    """Output, lse and gradients of one rank, twice."""
    from qkv.distributed import attention

    case = CASES[name]
    found: list[list[torch.Tensor]] = []
    for _ in range(2):
        arrays = [a.to(dtype).requires_grad_() for a in case.arrays]
        variants = case.variants(*arrays)
        order = order_of(order_name, ranks, case.variants(*case.arrays))
        swap = layout == "blhd"
        shards = [order.shard(t, rank).to(dtype) for t in operands()[:4]]
        q, k, v, d_out = (t.swapaxes(1, 2).contiguous() if swap else t for t in shards)
        d_lse = order.shard(operands()[4], rank, axis=-1).to(dtype)
        inputs = [t.requires_grad_() for t in (q, k, v)]
        out, lse = attention(
            *inputs, *variants, strategy=strategy, order=order, return_lse=True, layout=layout
        )
        d_lse = torch.where(torch.isfinite(lse), d_lse, 0.0)
        gradients = torch.autograd.grad((out, lse), inputs + arrays, (d_out, d_lse))
        rows = [out, *gradients[:3]]
        rows = [t.swapaxes(1, 2) if swap else t for t in rows]
        found.append([rows[0].detach(), lse.detach(), *rows[1:], *gradients[3:]])
    same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return {"found": [t.double() for t in found[0]], "same bits": same}


def check(group: Any, ranks: int, name: str, strategy: str, order_name: str,
          dtype: torch.dtype = torch.float32, layout: str = "bhld") -> None:  # fmt: skip
    answers = group(ranks)(run_case, name, strategy, order_name, dtype, layout)
    assert all(answer["same bits"] for answer in answers)
    order = order_of(order_name, ranks, CASES[name].variants(*CASES[name].arrays))
    (out, lse), gradients = expected(name)
    tolerance = {torch.float64: 1e-12, torch.float32: 3e-5}[dtype]
    columns = list(zip(*[answer["found"] for answer in answers], strict=True))
    axes = (-2, -1, -2, -2, -2)
    for column, axis, right in zip(columns[:5], axes, (out, lse, *gradients[:3]), strict=True):
        whole = order.unshard(list(column), axis)
        torch.testing.assert_close(whole, right, rtol=tolerance, atol=tolerance)
    for column, right in zip(columns[5:], gradients[3:], strict=True):
        for of_rank in column:
            torch.testing.assert_close(of_rank, right, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(4)
def test_every_variant_on_two_ranks(group: Any, name: str, strategy: str) -> None:
    check(group, 2, name, strategy, "zigzag")


@pytest.mark.slow
@pytest.mark.parametrize("order_name", ORDERS)
@pytest.mark.parametrize("name", ["causal", "packed documents", "bias", "sinks"])
@pytest.mark.one_in(4)
def test_every_order_in_a_ring_of_three(group: Any, name: str, order_name: str) -> None:
    check(group, 3, name, "ring", order_name)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring", "gather", "ulysses", "auto"])
@pytest.mark.parametrize("name", ["window", "t5", "sinks"])
@pytest.mark.one_in(4)
def test_four_ranks(group: Any, name: str, strategy: str) -> None:
    check(group, 4, name, strategy, "balanced")


@pytest.mark.slow
def test_float64_and_the_other_layout(group: Any) -> None:
    check(group, 2, "alibi", "ring", "zigzag", torch.float64, "blhd")
    check(group, 2, "alibi", "ulysses", "contiguous", torch.float64, "blhd")


@pytest.mark.slow
def test_runs_from_the_middle_of_a_shard(group: Any) -> None:
    """A window in zigzag order needs the second run of a neighbour's shard, and not its first."""
    check(group, 3, "window", "ring", "zigzag")


def with_a_sink_of_nothing(rank: int, ranks: int) -> torch.Tensor:
    import qkv
    from qkv.distributed import attention

    rows = slice(rank * LENGTH // ranks, (rank + 1) * LENGTH // ranks)
    shards = [t[..., rows, :] for t in operands()[:3]]
    sinks = CASES["sinks"].arrays[0].clone()
    sinks[1] = -torch.inf
    past = torch.ones(LENGTH, LENGTH).tril(-1).bool()
    out = attention(*shards, past, qkv.Sinks(sinks.requires_grad_()), timeout=60)
    (gradient,) = torch.autograd.grad(out.sum(), sinks)
    return gradient


def test_the_gradient_of_a_sink_that_takes_no_share(group: Any) -> None:
    """0, although the first row sees no key; the others as without that row."""
    q, k, v = operands()[:3]
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    sinks = CASES["sinks"].arrays[0].clone()
    sinks[1] = -torch.inf
    sinks.requires_grad_()
    scores = (q @ k.mT / q.shape[-1] ** 0.5)[:, :, 1:]
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu().bool()[1:], -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    (right,) = torch.autograd.grad((torch.softmax(scores, -1)[..., :-1] @ v).sum(), sinks)
    for gradient in group(2)(with_a_sink_of_nothing):
        assert gradient[1] == 0
        torch.testing.assert_close(gradient, right, rtol=1e-10, atol=1e-10)


def held_by_checkpoints(rank: int, ranks: int) -> dict[str, Any]:
    """Bytes that eight layers hold after a forward pass, those of one output, and gradients."""
    from torch.utils.checkpoint import checkpoint

    from qkv.distributed import attention

    q, k, v = (draw(n, 4, 256, 32).float().requires_grad_() for n in range(3))

    def layer(shift: torch.Tensor) -> torch.Tensor:
        return attention(q + shift, k, v, qkv.Causal(), strategy="ring").sum()

    total = layer(torch.zeros(()))
    expected = torch.autograd.grad(total + layer(total), (q, k, v))
    tracemalloc.start()
    shifts = [torch.zeros(())]
    for _ in range(8):
        shifts.append(checkpoint(layer, shifts[0], use_reentrant=False))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    total = checkpoint(layer, shifts[0], use_reentrant=False)
    total = total + checkpoint(layer, total, use_reentrant=False)
    found = torch.autograd.grad(total, (q, k, v))
    same = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return {"held": held, "output": q.nbytes, "same": same}


def test_activation_checkpointing_frees_outputs(group: Any) -> None:
    """Outputs of the first forward pass were kept beside what torch saves and computes anew."""
    for found in group(2)(held_by_checkpoints):
        assert found["held"] < 4 * found["output"]
        assert found["same"]
