"""DTensors of any placement: taken with their own dimension of the mesh, and given back whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import qkv

BATCH, HEADS, ROWS, DIM = 4, 2, 5, 8


def operands(blhd: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, ROWS, HEADS, DIM) if blhd else (BATCH, HEADS, ROWS, DIM)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def whole(rank: int, ranks: int, sizes: tuple[int, ...], spread: str, layout: str) -> Any:
    """What `full_tensor()` makes of output, lse and the gradient of the query."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from qkv.distributed import attention

    blhd = layout == "blhd"
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "rows"))
    rows = Shard(1 if blhd else 2)
    placements = [Shard(0) if spread == "batch" else Replicate(), rows]
    given = [distribute_tensor(t, mesh, placements).requires_grad_() for t in operands(blhd)]
    out, lse = attention(
        *given, qkv.Causal(), layout=layout, mesh=mesh, dim="rows", return_lse=True, timeout=60
    )
    (gradient,) = torch.autograd.grad(out.to_local().sum(), given[:1])
    stored = out.stride() == torch.empty(out.shape).stride() or blhd
    return stored, [of.full_tensor().detach() for of in (out, lse, gradient)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "spread", "layout"),
    [
        ((1, 2), "nothing", "bhld"),  # 3 and 2 rows
        ((1, 3), "nothing", "blhd"),  # 2, 2 and 1
        ((1, 4), "nothing", "bhld"),  # 2, 2, 1 and 0
        ((2, 1), "batch", "bhld"),
        ((2, 2), "batch", "blhd"),
        ((3, 1), "batch", "bhld"),  # texts that do not divide evenly
    ],
)
def test_full_tensors_are_those_of_one_process(
    group: Any, sizes: tuple[int, ...], spread: str, layout: str
) -> None:
    q, k, v = (t.requires_grad_() for t in operands())
    if layout == "blhd":
        q, k, v = (t.detach().swapaxes(1, 2).requires_grad_() for t in operands(True))
    scores = (q @ k.mT / DIM**0.5).masked_fill(torch.ones(ROWS, ROWS).triu(1).bool(), -torch.inf)
    out = torch.softmax(scores, -1) @ v
    (gradient,) = torch.autograd.grad(out.sum(), q)
    lse = torch.logsumexp(scores, -1)
    if layout == "blhd":
        out, gradient = (t.swapaxes(1, 2) for t in (out, gradient))
    for stored, found in group(sizes[0] * sizes[1])(whole, sizes, spread, layout):
        assert stored
        for one, right in zip(found, (out, lse, gradient), strict=True):
            torch.testing.assert_close(one, right.detach(), rtol=1e-12, atol=1e-12)


def misplaced(rank: int, ranks: int, what: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    from qkv.distributed import attention, inspect

    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("data", "rows"))
    placements: list[Any] = [Replicate(), Shard(2)]
    tensors, options, call, variants = operands(), {"mesh": mesh, "dim": "rows"}, attention, ()
    match what:
        case "another dimension":
            options["dim"] = "data"
        case "no mesh" | "inspected":
            options = {}
            call = inspect if what == "inspected" else attention
        case "heads":
            placements, variants = [Shard(0), Shard(1)], (qkv.ALiBi(),)
            tensors = [t[0] for t in tensors]
        case "rows along two":
            placements = [Shard(2), Shard(2)]
    given: list[Any] = [distribute_tensor(t, mesh, placements) for t in tensors]
    match what:
        case "sums":
            given[2] = DTensor.from_local(tensors[2], mesh, [Partial(), Shard(2)])
        case "batches":
            given = [distribute_tensor(t[:2], mesh, placements) for t in tensors]
            given[0] = distribute_tensor(tensors[0][:2], mesh, [Shard(0), Shard(2)])
        case "batches of keys":
            given[0] = distribute_tensor(tensors[0][:1], mesh, placements)
            given[1:] = [distribute_tensor(t, mesh, [Shard(0), Shard(2)]) for t in tensors[1:]]
    try:
        call(*given, *variants, timeout=60, **options)
    except qkv.DistributedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("another dimension", "of this process alone, and the call is made over the ranks [0, 1]"),
        ("no mesh", "of this process alone, and the call is made over the ranks [0, 1]"),
        ("inspected", "of this process alone, and the call is made over the ranks [0, 1]"),
        ("rows along two", "on the ranks [0, 1], and the call is made over the ranks of this"),
        ("heads", "(Shard(dim=0), Shard(dim=1)); it must be sharded along its rows, dimension 1."),
        ("sums", "it must be sharded along its rows, dimension 2, or along its batch"),
        ("batches", "a batch is sharded alike in all three"),
        ("batches of keys", "a batch is sharded alike in all three"),
    ],
)
def test_dtensors_that_lie_otherwise_are_refused(group: Any, what: str, words: str) -> None:
    for said in group(2)(misplaced, what):
        assert words in said


def permuted(rank: int, ranks: int) -> str:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from qkv.distributed import attention

    mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("rows",))
    given = [distribute_tensor(t, mesh, [Shard(2)]) for t in operands()]
    try:
        out = attention(*given, qkv.Causal(), mesh=mesh, dim="rows", timeout=60)
    except qkv.DistributedError as error:
        return str(error)
    right = qkv.attention(*operands(), qkv.Causal())
    return str((out.full_tensor() - right).abs().max().item())


def test_a_mesh_whose_ranks_fall(group: Any) -> None:
    """The first rows lie on the mesh's first rank, which is the last of the process group."""
    for said in group(2)(permuted):
        assert "its rows on the ranks [1, 0], and the call is made over the ranks [0, 1]" in said
