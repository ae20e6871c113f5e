"""Shards as they were given: plain tensors and DTensors, in either layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qkv.errors import QkvError, ShapeError, UnsupportedError

__all__ = ["Placed", "placed"]

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
        return self._as_dtensor(out, 0)

    def rows(self, lse: Tensor) -> Any:
        """lse with as many dimensions as the call has."""
        return self._as_dtensor(lse[0] if self.ndim == 2 else lse, 1)

    def _as_dtensor(self, local: Tensor, lost: int) -> Any:
        if self.like is None:
            return local
        from torch.distributed.tensor import DTensor, Shard

        placements = list(self.like.placements)
        if lost:  # lse has heads before rows, and no last dimension.
            placements = [Shard(local.ndim - 1) if isinstance(p, Shard) else p for p in placements]
        return DTensor.from_local(local, self.like.device_mesh, placements, run_check=False)


def placed(query: Any, key: Any, value: Any, layout: str, mesh: Any, dim: Any) -> Placed:
    """Take what this rank was given apart.

    Raises
    ------
    UnsupportedError, ShapeError
        For what is no tensor at all, since a rank without one can tell the others nothing.
    """
    locals_: list[Tensor] = []
    like = None
    problem = ""
    blhd = layout == "blhd"
    for name, given in (("query", query), ("key", key), ("value", value)):
        if not isinstance(given, torch.Tensor):
            raise UnsupportedError(
                f"{name} is a {type(given).__name__}, not a tensor.",
                action="Pass this rank's rows as a torch tensor, as in torch.from_numpy(array).",
            )
        local: Any = given
        if hasattr(given, "placements"):
            problem = problem or _wrong_placement(name, given, blhd)
            like = given if name == "query" else like
            local = local.to_local()
        if local.device.type != "cpu":
            problem = problem or f"{name} is on {local.device}; ranks compute on the CPU."
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
    if k.shape[-3:-1] != v.shape[-3:-1]:
        problem = problem or f"key has shape {tuple(k.shape)} and value {tuple(v.shape)}."
    if not q.dtype == k.dtype == v.dtype:
        problem = problem or f"query is {q.dtype}, key {k.dtype} and value {v.dtype}."
    return Placed((q, k, v), problem, max(query.ndim, key.ndim, value.ndim), blhd, like)


def _wrong_placement(name: str, tensor: Any, blhd: bool) -> str:
    """What is wrong with how a DTensor is placed, if anything is."""
    from torch.distributed.tensor import Shard

    rows = tensor.ndim - (3 if blhd else 2)
    sharded = [p for p in tensor.placements if isinstance(p, Shard)]
    if any(p.dim not in (rows, 0) for p in sharded) or not any(p.dim == rows for p in sharded):
        return (
            f"{name} is placed as {tuple(tensor.placements)}; it must be sharded along its rows, "
            f"dimension {rows}."
        )
    return ""
