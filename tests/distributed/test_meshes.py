"""Meshes of two dimensions, DTensors, 16-bit types, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qkv
from tests.distributed.cases import CASES, LENGTH, expected, operands


def on_a_mesh(rank: int, ranks: int, name: str, strategy: str) -> list[torch.Tensor]:
    """Keys travel along two ranks, heads are shared out to two."""
    from torch.distributed.device_mesh import init_device_mesh

    from qkv.distributed import Order, attention

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("keys", "heads"))
    order = Order.zigzag(LENGTH, ranks)
    arrays = [a.float().requires_grad_() for a in CASES[name].arrays]
    inputs = [order.shard(t, rank).float().requires_grad_() for t in operands()[:3]]
    out, lse = attention(
        *inputs, *CASES[name].variants(*arrays), mesh=mesh, dim=("keys", "heads"), order=order,
        strategy=strategy, return_lse=True,
    )  # fmt: skip
    d_out, d_lse = operands()[3:]
    cotangents = order.shard(d_out, rank).float(), order.shard(d_lse, rank, axis=-1).float()
    return [out.detach(), *torch.autograd.grad((out, lse), inputs + arrays, cotangents)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), [("sinks", "ring"), ("alibi", "gather")])
def test_keys_along_one_dimension_and_heads_along_the_other(
    group: Any, name: str, strategy: str
) -> None:
    from qkv.distributed import Order

    order = Order.zigzag(LENGTH, 4)
    found = group(4)(on_a_mesh, name, strategy)
    (out, _), gradients = expected(name)
    close = {"rtol": 3e-5, "atol": 3e-5}
    for n, right in enumerate((out, *gradients[:3])):
        whole = order.unshard([of_rank[n].double() for of_rank in found])
        torch.testing.assert_close(whole, right, **close)
    for of_rank in found:
        for own, right in zip(of_rank[4:], gradients[3:], strict=True):
            torch.testing.assert_close(own.double(), right, rtol=3e-5, atol=3e-4)


def numbers_on_a_mesh(rank: int, ranks: int) -> list[int]:
    """The numbers of two calls of ranks of which some have made calls in other groups before."""
    from torch.distributed.device_mesh import init_device_mesh

    from qkv.distributed import Order, attention
    from qkv.distributed.messages.links import Links

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("keys", "heads"))
    order = Order.contiguous(LENGTH, ranks)
    shards = [order.shard(t, rank).float() for t in operands()[:3]]
    if mesh.get_local_rank("heads") == 0:
        Links.last_number += 100
    numbers = [Links.last_number]
    for _ in range(2):
        attention(*shards, mesh=mesh, dim=("keys", "heads"), order=order, timeout=60)
        numbers.append(Links.last_number)
    return numbers


def test_no_number_of_a_call_comes_again(group: Any) -> None:
    """Messages of a number that came before might be those of a call that a rank left out."""
    for before, first, second in group(4)(numbers_on_a_mesh):
        assert before < first < second


def on_a_mesh_of(rank: int, ranks: int, numbers: Any, dim: Any) -> str:
    """The error of a call on a mesh of these ranks, at a place in it that torch names."""
    from torch.distributed.device_mesh import DeviceMesh

    from qkv.distributed import Order, attention

    mesh = DeviceMesh("cpu", numbers, mesh_dim_names=("keys", "heads"))
    places = [mesh.get_local_rank(name) for name in ("keys", "heads")]
    order = Order.contiguous(LENGTH, 4)
    shards = [order.shard(t, 2 * places[0] + places[1]).float() for t in operands()[:3]]
    try:
        attention(*shards, qkv.Causal(), mesh=mesh, dim=dim, order=order, timeout=60)
    except qkv.QkvError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("numbers", "dim", "words"),
    [
        ([[3, 1], [0, 2]], ("keys", "heads"), "the ranks of the mesh do not rise along both"),
        ([[0, 1], [3, 2]], ("heads", "keys"), "the ranks of the mesh do not rise along both"),
        ([[0, 1], [2, 3]], ("keys", "keys"), "does not say what is spread along what"),
        ([[0, 2], [1, 3]], (0, 1), "no error"),
    ],
)
def test_meshes_whose_groups_count_otherwise_are_refused(
    group: Any, numbers: Any, dim: Any, words: str
) -> None:
    """Two ranks once took the same place in the order, and the output was that of other rows."""
    for said in group(4)(on_a_mesh_of, numbers, dim):
        assert words in said


def with_dtensors(rank: int, ranks: int) -> tuple[Any, ...]:
    """The placement and the rows of what comes of DTensors, and their gradient."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from qkv.distributed import attention

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("rows",))
    size = LENGTH // ranks
    shards = [t.float()[:, :, rank * size : (rank + 1) * size] for t in operands()[:3]]
    given = [DTensor.from_local(t, mesh, [Shard(2)]).requires_grad_() for t in shards]
    out, lse = attention(*given, qkv.Causal(), mesh=mesh, dim="rows", return_lse=True)
    (gradient,) = torch.autograd.grad(out.to_local().sum(), given[:1])
    whole = DTensor.from_local(shards[0], mesh, [Replicate()])
    message = ""
    try:
        attention(whole, *given[1:], mesh=mesh, dim="rows")
    except qkv.QkvError as error:
        message = str(error)
    return (
        str(out.placements), str(lse.placements), out.full_tensor().detach(),
        gradient.full_tensor(), message,
    )  # fmt: skip


def test_dtensors_go_in_and_come_out(group: Any) -> None:
    found = group(2)(with_dtensors)
    (out, _), _ = expected("causal")
    query, key, value = (t.clone().requires_grad_() for t in operands()[:3])
    k, v = (t.repeat_interleave(2, dim=1) for t in (key, value))
    right = torch.nn.functional.scaled_dot_product_attention(query, k, v, is_causal=True)
    (of_query,) = torch.autograd.grad(right.sum(), query)
    for placements, of_lse, whole, gradient, message in found:
        assert placements == of_lse == "(Shard(dim=2),)"
        torch.testing.assert_close(whole.double(), out, rtol=3e-5, atol=3e-5)
        torch.testing.assert_close(gradient.double(), of_query, rtol=3e-5, atol=3e-5)
        assert "it must be sharded along its rows, dimension 2" in message


def in_bfloat16(rank: int, ranks: int) -> list[torch.Tensor]:
    from qkv.distributed import Order, attention

    order = Order.zigzag(LENGTH, ranks)
    inputs = [order.shard(t, rank).bfloat16().requires_grad_() for t in operands()[:3]]
    out = attention(*inputs, qkv.Causal(), order=order, strategy="ring")
    gradients = torch.autograd.grad(out, inputs, order.shard(operands()[3], rank).bfloat16())
    return [out.detach(), *gradients]


@pytest.mark.slow
def test_bfloat16_is_as_exact_as_in_one_process(group: Any) -> None:
    from qkv.distributed import Order

    order = Order.zigzag(LENGTH, 2)
    found = group(2)(in_bfloat16)
    inputs = [t.bfloat16().double().requires_grad_() for t in operands()[:3]]
    k, v = (t.repeat_interleave(2, dim=1) for t in inputs[1:])
    right = torch.nn.functional.scaled_dot_product_attention(inputs[0], k, v, is_causal=True)
    d_out = operands()[3].bfloat16()
    gradients = torch.autograd.grad(right, inputs, d_out.double())
    plain = [t.bfloat16().requires_grad_() for t in operands()[:3]]
    alone = qkv.attention(*plain, qkv.Causal())
    of_alone = (alone, *torch.autograd.grad(alone, plain, d_out))
    for n, (true, one) in enumerate(zip((right, *gradients), of_alone, strict=True)):
        whole = order.unshard([of_rank[n] for of_rank in found]).double()
        error, of_one = ((of - true).abs().max() for of in (whole, one.double()))
        assert error <= 2 * of_one + 2**-8 * true.abs().max() / 4


def refused(rank: int, ranks: int, what: str) -> str:
    from qkv.distributed import Order, attention

    q, k, v = (Order.contiguous(LENGTH, ranks).shard(t, rank).float() for t in operands()[:3])
    try:
        match what:
            case "dropout":
                attention(q, k, v, qkv.Dropout(0.1, seed=1))
            case "heads":
                attention(q[:, :3], k[:, :3], v[:, :3], strategy="ulysses")
            case "strategy":
                attention(q, k, v, strategy="rings")
            case "array":
                attention(q.numpy(), k, v)
            case "compiled":
                whole = torch.compile(lambda *x: attention(*x), fullgraph=True, backend="eager")
                whole(q, k, v)
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("dropout", "Dropout numbers the rows of a whole problem"),
        ("heads", "3 query heads cannot be shared out evenly to 2 ranks"),
        ("strategy", "strategy='rings' is not known"),
        ("array", "query is a ndarray, not a tensor"),
        ("compiled", "cannot be a part of a compiled graph"),
    ],
)
def test_what_cannot_be_is_said(group: Any, what: str, words: str) -> None:
    for said in group(2)(refused, what):
        assert words in said


def compiled_around(rank: int, ranks: int) -> bool:
    from qkv.distributed import Order, attention

    order = Order.contiguous(LENGTH, ranks)
    shards = [order.shard(t, rank).float() for t in operands()[:3]]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q * 2, k, v, order=order) + 1

    return torch.equal(torch.compile(call, backend="eager")(*shards), call(*shards))


def test_compiled_functions_leave_the_call_out(group: Any) -> None:
    assert all(group(2)(compiled_around))
