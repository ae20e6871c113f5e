"""Shards as they were given: plain tensors and DTensors, in either layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from qkv.arguments.readable_checks import check_layout
from qkv.arrays.torch_arrays import check_dense, check_values
from qkv.bridges.torch.operands import is_tracked
from qkv.distributed.messages.links import Links
from qkv.errors import QkvError, ShapeError, UnsupportedError

__all__ = ["Placed", "placed", "refuse_transformed"]

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Placed:
    """Query, key and value as `(*batch, heads, rows, dim)`, and how results are given back.

    Attributes
    ----------
    tensors : (Tensor, Tensor, Tensor)
    problem : str
        What is wrong with what this rank was given, as one sentence; empty if nothing is.
    """

    tensors: tuple[Tensor, Tensor, Tensor]
    problem: str
    ndim: int
    blhd: bool
    like: Any

    def restored(self, out: Tensor) -> Any:
        """The output like the query: its layout, and a DTensor for one."""
        if self.ndim == 2:
            out = out[0]
        elif self.blhd:
            out = out.swapaxes(-3, -2)
        return self._as_dtensor(out)

    def rows(self, lse: Tensor) -> Any:
        """lse with as many dimensions as the call has."""
        return self._as_dtensor(lse[0] if self.ndim == 2 else lse, of_lse=True)

    def _as_dtensor(self, local: Tensor, *, of_lse: bool = False) -> Any:
        """A result sharded as the query is: its rows along theirs, its batch along theirs.

        The shape of the whole is said, since rows need not divide evenly.
        """
        if self.like is None:
            return local
        from torch.distributed.tensor import DTensor, Shard

        like, blhd = self.like, self.blhd and not of_lse
        rows = local.ndim - 1 if of_lse else _rows_of(local.ndim, blhd)
        batches = local.ndim + of_lse - like.ndim
        shape, placements = list(local.shape), list(like.placements)
        for n, placement in enumerate(placements):
            if isinstance(placement, Shard):
                is_rows = placement.dim == _rows_of(like.ndim, self.blhd)
                dim = rows if is_rows else placement.dim + batches
                placements[n], shape[dim] = Shard(dim), like.shape[placement.dim]
        if blhd and len(shape) > 2:
            stored = [*shape[:-3], shape[-2], shape[-3], shape[-1]]
            stride = torch.empty(stored, device="meta").swapaxes(-3, -2).stride()
        else:
            stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, like.device_mesh, placements,
            run_check=False, shape=torch.Size(shape), stride=stride,
        )  # fmt: skip


def placed(query: Any, key: Any, value: Any, layout: str, links: Sequence[Links]) -> Placed:
    """Take what this rank was given apart.

    Parameters
    ----------
    links : sequence of Links
        The groups over which the rows are spread, the outer one first.

    Raises
    ------
    UnsupportedError, ShapeError, DTypeError
        For what is not a dense tensor on the CPU.
    ArgumentError
        If the layout is not known.
    """
    locals_: list[Tensor] = []
    like = None
    problem = ""
    check_layout(layout)
    blhd = layout == "blhd"
    for name, given in (("query", query), ("key", key), ("value", value)):
        if not isinstance(given, torch.Tensor):
            raise UnsupportedError(
                f"{name} is a {type(given).__name__}, not a tensor.",
                action="Pass this rank's rows as a torch tensor, as in torch.from_numpy(array).",
            )
        local: Any = given
        if hasattr(given, "placements"):
            problem = problem or _wrong_placement(name, given, blhd, links)
            like = given if name == "query" else like
            local = local.to_local()
        refuse_transformed(local, name)
        check_dense(local, name)
        check_values(local, name)
        if local.device.type != "cpu":
            raise UnsupportedError(
                f"{name} is on {local.device}; ranks compute on the CPU.",
                action=f"Pass {name}.cpu(), or use torch's attention there.",
            )
        if local.ndim < 2:
            raise ShapeError(
                f"{name} has {local.ndim} dimensions.",
                action="Pass (..., heads, rows, dim).",
            )
        if local.ndim == 2:
            local = local[None]
        elif blhd:
            local = local.swapaxes(-3, -2)
        locals_.append(local)
    q, k, v = locals_
    try:
        batch = torch.broadcast_shapes(*(t.shape[:-3] for t in locals_))
        q, k, v = (t.expand(*batch, *t.shape[-3:]) for t in locals_)
    except (RuntimeError, QkvError):
        problem = problem or (
            f"the leading dimensions of {[tuple(t.shape) for t in locals_]} do not broadcast."
        )
    of_batch = [_spread_batch(given) for given in (query, key, value)]
    if like is not None and (
        any(of - of_batch[0] for of in of_batch)
        or (of_batch[0] and q.shape[:-3] != locals_[0].shape[:-3])
    ):
        problem = problem or (
            f"{[tuple(t.shape[:-3]) for t in locals_]} are the batches of query, key and value on "
            "this rank; a batch is sharded alike in all three, or is 1 in key and value."
        )
    if k.shape[-3:-1] != v.shape[-3:-1]:
        problem = problem or f"key has shape {tuple(k.shape)} and value {tuple(v.shape)}."
    if not q.dtype == k.dtype == v.dtype:
        problem = problem or f"query is {q.dtype}, key {k.dtype} and value {v.dtype}."
    return Placed((q, k, v), problem, max(query.ndim, key.ndim, value.ndim), blhd, like)


def refuse_transformed(array: Any, role: str) -> None:
    """Raise for a tensor that a transform of torch.func, or forward mode, follows."""
    with torch.no_grad():
        if not is_tracked(array):
            return
    raise UnsupportedError(
        f"torch.func or forward mode follows {role}, and attention over ranks does not.",
        action="Take gradients by backward() or torch.autograd.grad, and batches as a leading "
        "dimension.",
    )


def _rows_of(ndim: int, blhd: bool) -> int:
    """The dimension of the rows."""
    return ndim - (3 if blhd and ndim > 2 else 2)


def _wrong_placement(name: str, tensor: Any, blhd: bool, links: Sequence[Links]) -> str:
    """What is wrong with how a DTensor is placed, if anything is."""
    from torch.distributed.tensor import Replicate, Shard

    rows = _rows_of(tensor.ndim, blhd)
    is_placed = f"{name} is placed as {tuple(tensor.placements)}"
    dims = {p.dim if type(p) is Shard else None for p in tensor.placements if p != Replicate()}
    if rows not in dims or dims - {rows, 0 if tensor.ndim > 3 else rows}:
        batch = ", or along its batch, dimension 0, besides" if tensor.ndim > 3 else ""
        return f"{is_placed}; it must be sharded along its rows, dimension {rows}{batch}."
    mesh = tensor.device_mesh
    along = [_ranks_along(mesh, n) for n, p in enumerate(tensor.placements) if p == Shard(rows)]
    called = [[0] if of.group is None else dist.get_process_group_ranks(of.group) for of in links]
    spread, wanted = ([ranks for ranks in of if len(ranks) > 1] for of in (along, called))
    if spread != wanted:
        return (
            f"{is_placed}, its rows on the ranks {_in_words(spread)}, and the call is made over "
            f"the ranks {_in_words(wanted)}; name the mesh and the dimension along which its rows "
            "are sharded."
        )
    return ""


def _ranks_along(mesh: Any, dim: int) -> list[int]:
    """The ranks of a dimension of a mesh that has this one, in the order of the mesh."""
    place: list[Any] = list(mesh.get_coordinate())
    place[dim] = slice(None)
    ranks: list[int] = mesh.mesh[tuple(place)].tolist()
    return ranks


def _in_words(groups: Sequence[Sequence[int]]) -> str:
    return " x ".join(str(list(of)) for of in groups) or "of this process alone"


def _spread_batch(given: Any) -> set[int]:
    """The dimensions of the mesh along which a DTensor has its batch."""
    placements = getattr(given, "placements", ()) if given.ndim > 3 else ()
    return {n for n, placement in enumerate(placements) if getattr(placement, "dim", None) == 0}
