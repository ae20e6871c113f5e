"""Calls over ranks that cannot be right are refused, and what one process does, ranks do too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from tests.distributed.cases import LENGTH, operands

RANKS = 2


def shards(rank: int, ranks: int, *, grad: bool = True) -> list[torch.Tensor]:
    """This rank's rows of query, key and value."""
    rows = slice(rank * LENGTH // ranks, (rank + 1) * LENGTH // ranks)
    return [t[..., rows, :].clone().requires_grad_(grad) for t in operands()[:3]]


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def written_between(rank: int, ranks: int, library: str) -> Any:
    """The gradient of values, or the error, where a bias is written to after the forward pass."""
    from qkv.distributed import attention

    bias: Any = np.zeros((LENGTH, LENGTH))
    bias = torch.from_numpy(bias) if library == "torch" else bias
    query, key, value = shards(rank, ranks)
    out = attention(query, key, value, qkv.Bias(bias), timeout=60)
    bias += 5 * np.eye(LENGTH) if library == "numpy" else 5 * torch.eye(LENGTH)
    if library == "torch":
        return error_of(out.sum().backward)
    return torch.autograd.grad(out.sum(), value)[0]


def test_a_tensor_that_was_written_to_is_told_to_the_backward_pass(group: Any) -> None:
    for said in group(RANKS)(written_between, "torch"):
        assert "modified by an inplace operation" in said


def test_an_array_that_was_written_to_leaves_gradients_as_they_were(group: Any) -> None:
    found = torch.cat(group(RANKS)(written_between, "numpy"), dim=-2)
    query, key, value = (t.clone().requires_grad_() for t in operands()[:3])
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(found, torch.autograd.grad(out.sum(), value)[0])


def second_gradient(rank: int, ranks: int, strategy: str) -> str:
    """A penalty on a gradient, beside a loss that has one."""
    from qkv.distributed import attention

    query, key, value = shards(rank, ranks)
    out = attention(query, key, value, qkv.Causal(), strategy=strategy, timeout=60)
    (gradient,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    return error_of((out.mean() + gradient.pow(2).sum()).backward)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_second_gradient_is_refused(group: Any, strategy: str) -> None:
    """A second gradient was once left out of the sum in silence."""
    for said in group(RANKS)(second_gradient, strategy):
        assert "UnsupportedError: a second gradient of attention over ranks is wanted" in said


def with_scales(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    from qkv.distributed import attention

    scale = torch.linspace(0.1, 0.4, 8, dtype=torch.float64, requires_grad=True)
    out = attention(*shards(rank, ranks, grad=False), qkv.Causal(), scale=scale, timeout=60)
    (gradient,) = torch.autograd.grad(out.pow(2).sum(), scale)
    return out.detach(), gradient


def test_a_scale_that_is_learned(group: Any) -> None:
    found = group(RANKS)(with_scales)
    scale = torch.linspace(0.1, 0.4, 8, dtype=torch.float64, requires_grad=True)
    query, key, value = operands()[:3]
    out = torch.nn.functional.scaled_dot_product_attention(
        query * scale[:, None, None], key, value, is_causal=True, scale=1.0, enable_gqa=True
    )
    (gradient,) = torch.autograd.grad(out.pow(2).sum(), scale)
    torch.testing.assert_close(torch.cat([of[0] for of in found], dim=-2), out)
    torch.testing.assert_close(sum(of[1] for of in found), gradient)


def under_autocast(rank: int, ranks: int) -> torch.Tensor:
    from qkv.distributed import attention

    query, key, value = (t.float() for t in shards(rank, ranks, grad=False))
    with torch.autocast("cpu", torch.bfloat16):
        return attention(query.bfloat16(), key, value, qkv.Causal(), timeout=60)


def test_operands_in_the_type_that_autocast_asks_for(group: Any) -> None:
    found = torch.cat(group(RANKS)(under_autocast), dim=-2)
    query, key, value = (t.bfloat16() for t in operands()[:3])
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=True, enable_gqa=True
    )
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


def trained(*given: Any, **options: Any) -> None:
    from qkv.distributed import attention

    attention(*given, **options).sum().backward()


def misused(rank: int, ranks: int, what: str) -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    from qkv.distributed import attention, decode

    query, key, value = shards(rank, ranks, grad=what == "cap")
    keywords: dict[str, Any] = {"timeout": 60}
    variants: list[Any] = []
    call: Callable[..., Any] = attention
    match what:
        case "no mesh":
            keywords["dim"] = "rows"
        case "no such dimension" | "two dimensions":
            keywords["mesh"] = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("a", "b"))
            keywords["dim"] = "rows" if what == "no such dimension" else None
        case "no group":
            keywords["mesh"] = "rows"
        case "another group":
            keywords["mesh"] = dist.new_group([0])
        case "another mesh":
            keywords["mesh"] = DeviceMesh("cpu", [0])
        case "destroyed group" | "group of a mesh destroyed":
            keywords["mesh"] = ended = dist.new_group()
            if "mesh" in what:
                keywords["mesh"], keywords["dim"] = init_device_mesh("cpu", (ranks, 1)), 1
                ended = keywords["mesh"].get_group(1)
            # A rank that leaves while another still connects to it is an error of Gloo's there.
            dist.barrier()
            dist.destroy_process_group(ended)
        case "order":
            keywords["order"] = "zigzag" if rank == 1 else None
        case "gradients of rows":  # That of the sinks is wanted on both ranks.
            variants = [qkv.Sinks(torch.zeros(8, dtype=torch.float64, requires_grad=True))]
            query.requires_grad_(rank == 1)
            keywords = {"timeout": 60, "strategy": "ulysses"}
            call = trained
        case "cap":
            variants = [qkv.Softcap(torch.nn.Parameter(torch.tensor(3.0)))]
        case "torch.func":
            return error_of(
                lambda: torch.func.grad(lambda q: attention(q, key, value).sum())(query)
            )
        case "decode":
            call, keywords = decode, {"timeout": 0}
        case "flag":
            keywords["return_lse"] = "yes"
        case "DTensor":
            from torch.distributed.tensor import Replicate, distribute_tensor

            scales = torch.ones(8, dtype=torch.float64)
            mesh = init_device_mesh("cpu", (ranks,))
            keywords["scale"] = distribute_tensor(scales, mesh, [Replicate()])
        case "layout":
            keywords["layout"] = "bshd"
        case _:
            keywords["timeout"] = float(what)
    return error_of(lambda: call(query, key, value, *variants, **keywords))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no mesh", "dim='rows' names a dimension of a mesh, and mesh is None"),
        ("no such dimension", "dim='rows' does not name one dimension of the mesh"),
        ("two dimensions", "dim=None does not name one dimension of the mesh"),
        ("no group", "mesh='rows' is neither a DeviceMesh nor a ProcessGroup"),
        ("destroyed group", "mesh is a process group that was destroyed"),
        ("group of a mesh destroyed", "mesh has a process group that was destroyed"),
        ("order", "order='zigzag' is not a qkv.distributed.Order"),
        ("gradients of rows", "whether gradients are wanted differs between ranks"),
        ("cap", "a gradient of cap of Softcap is wanted"),
        ("torch.func", "torch.func or forward mode follows query"),
        ("decode", "timeout=0 is not a number of seconds"),
        ("flag", "return_lse"),
        ("DTensor", "scale is a DTensor whose memory cannot be read"),
        ("layout", "layout='bshd' is not known"),  # It was once taken for "bhld".
        ("0", "timeout=0.0 is not a number of seconds"),  # torch takes it for no end.
        ("1e-4", "timeout=0.0001 is not a number of seconds"),
        ("-1", "timeout=-1.0 is not a number of seconds"),
        ("nan", "timeout=nan is not a number of seconds"),
        ("inf", "timeout=inf is not a number of seconds"),
    ],
)
def test_misuse_is_refused_on_every_rank(group: Any, what: str, words: str) -> None:
    for said in group(RANKS)(misused, what):
        assert words in said


def followed(rank: int, ranks: int, what: str) -> str:
    """The error of a call in which torch.func or forward mode follows something else than rows."""
    from torch.autograd import forward_ad

    from qkv.distributed import attention, inspect

    given = shards(rank, ranks, grad=False)

    def of_bias(bias: torch.Tensor) -> Any:
        call = inspect if what == "inspected bias" else attention
        return call(*given, qkv.Bias(bias), timeout=60)

    def of_scale(scale: torch.Tensor) -> Any:
        return attention(*given, scale=scale, timeout=60)

    call, array = (of_scale, torch.tensor(0.5)) if "scale" in what else (of_bias, torch.zeros(1))
    if what.startswith("torch.func"):
        return error_of(lambda: torch.func.grad(lambda x: call(x).sum())(array))
    with forward_ad.dual_level():
        return error_of(lambda: call(forward_ad.make_dual(array, torch.ones_like(array))))


@pytest.mark.parametrize(
    "what", ["bias", "inspected bias", "scale", "torch.func of bias", "torch.func of scale"]
)
def test_transforms_of_other_arrays_are_refused(group: Any, what: str) -> None:
    """The tangent of a bias was once lost in silence, and torch.func met errors of NumPy."""
    role = "scale" if "scale" in what else "an array of Bias"
    for said in group(RANKS)(followed, what):
        assert f"UnsupportedError: torch.func or forward mode follows {role}" in said


@pytest.mark.parametrize("what", ["another group", "another mesh"])
def test_a_process_outside_of_the_group_is_told_so(group: Any, what: str) -> None:
    said = group(RANKS)(misused, what)
    assert said[0] == "no error"
    assert "ArgumentError: this process, rank 1 of all, is not in" in said[1]


def test_orders_of_wrong_arguments() -> None:
    from qkv.distributed import Order, balanced, plan

    order = Order.contiguous(8, 2)
    x = np.zeros((1, 8, 4))
    for call in (
        lambda: order.shard(x, -1),  # The rank of a process outside of the group.
        lambda: order.shard(x, 2),
        lambda: order.rows(2),
        lambda: Order.zigzag("8", 2),
        lambda: Order.zigzag(8, 2.5),
        lambda: Order.striped(-3, 2),
        lambda: balanced("8", 2),
        lambda: balanced(8, "2"),
        lambda: plan(x, x, x, ranks="2"),
        lambda: plan(x, x, x, order="zigzag"),
        lambda: Order("mine", 8, (range(4), range(4, 8))),
        lambda: Order("mine", 8, None),
        lambda: Order("mine", "8", ((range(8),),)),
        lambda: Order.of_sizes([2.5, 5.5]),
        lambda: Order.of_sizes([9, -1]),
        lambda: order.shard([1, 2, 3, 4, 5, 6, 7, 8], 0, -1),
        lambda: order.shard(x, 0, "rows"),
        lambda: order.unshard([[1, 2, 3, 4], [5, 6, 7, 8]], -1),
    ):
        with pytest.raises(qkv.ArgumentError):
            call()
    with pytest.raises(qkv.ShapeError, match="no axis -2"):
        order.shard(np.zeros(8), 0)
