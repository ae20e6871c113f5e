"""A model whose sequence is spread along one dimension of a mesh, and its weights along another:

those of FSDP with the texts, or those of tensor parallelism with the heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.test_sharded_models import LENGTH, inputs, made

STEPS, RATE = 2, 0.5


def alone() -> tuple[list[float], list[torch.Tensor]]:
    """The losses of two steps in one process, and the parameters after them."""
    model, given = made("Llama").train(), inputs("plain")
    losses = []
    for _ in range(STEPS):
        loss = model(**given).loss
        losses.append(loss.item())
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
        model.zero_grad()
    return losses, [parameter.detach() for parameter in model.parameters()]


def with_fsdp(rank: int, ranks: int) -> tuple[list[float], list[torch.Tensor]]:
    """The same, where each rank has one text of two, half of its rows, and half of each weight."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import qkv.hf
    from qkv.distributed import Order

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "rows"))
    model, given = made("Llama").train(), inputs("plain")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    order, text = Order.zigzag(LENGTH, 2), mesh.get_local_rank("data")
    place = mesh.get_local_rank("rows")
    own = {k: order.shard(v[text : text + 1], place, axis=-1) for k, v in given.items()}
    losses = []
    for _ in range(STEPS):
        with qkv.hf.sharded(model, mesh=mesh, dim="rows", order=order, timeout=60):
            loss = model(**own).loss
            loss.backward()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item() / 2)  # FSDP takes the mean over texts as well.
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group("rows"))
                parameter -= RATE * parameter.grad
        model.zero_grad()
    return losses, [parameter.full_tensor().detach() for parameter in model.parameters()]


def with_tensor_parallelism(rank: int, ranks: int) -> tuple[list[float], list[torch.Tensor]]:
    """The same, where each rank has half of the rows of both texts, and half of the heads."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    import qkv.hf
    from qkv.distributed import Order

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "rows"))
    model, given = made("Llama").train(), inputs("plain")
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["heads"], {**plan, "self_attn.o_proj": RowwiseParallel()})
    order, place = Order.zigzag(LENGTH, 2), mesh.get_local_rank("rows")
    own = {k: order.shard(v, place, axis=-1) for k, v in given.items()}
    losses = []
    for _ in range(STEPS):
        with qkv.hf.sharded(model, mesh=mesh, dim="rows", order=order, timeout=60):
            loss = model(**own).loss
            loss.backward()
        whole = loss.detach().clone()
        dist.all_reduce(whole, group=mesh.get_group("rows"))
        losses.append(whole.item())
        with torch.no_grad():
            for parameter in model.parameters():
                gradient = parameter.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                dist.all_reduce(local, group=mesh.get_group("rows"))
                parameter -= RATE * gradient
        model.zero_grad()
    wholes = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return losses, [parameter.detach() for parameter in wholes]


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("step", [with_fsdp, with_tensor_parallelism])
def test_two_steps_are_those_of_one_process(group: Any, step: Any) -> None:
    losses, parameters = alone()
    assert losses[1] < losses[0]
    for its_losses, its_parameters in group(4)(step):
        assert its_losses == pytest.approx(losses, rel=1e-6)  # The loss is float32.
        for one, right in zip(its_parameters, parameters, strict=True):
            torch.testing.assert_close(one, right, rtol=1e-6, atol=1e-7)
