"""Messages between the ranks of one process group, with errors that name the rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Real
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from qkv.arguments.declarations import is_integer, shown
from qkv.errors import ArgumentError, DistributedError, UnsupportedError

__all__ = ["Links", "Pending", "checked_seconds", "group_of", "outside_of_graphs"]

Function = TypeVar("Function", bound=Callable[..., Any])

Message = torch.Tensor | tuple[torch.Tensor, ...]
"""One tensor or several for one rank, which receives as many."""

TIMEOUT = 300.0
"""Seconds that a rank waits for another, unless told otherwise."""


def checked_seconds(timeout: Any) -> float:
    """A timeout that torch can keep: it counts whole milliseconds, and takes 0 for no end."""
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if not is_number or not 1e-3 <= timeout <= 1e9:
        raise ArgumentError(
            f"timeout={shown(timeout)} is not a number of seconds from 0.001 to 1e9.",
            action=f"Leave it out for {TIMEOUT:g} seconds.",
        )
    return float(timeout)


def outside_of_graphs(function: Function) -> Function:
    """A function that torch.compile leaves out of its graphs, with everything that it calls."""
    left_out: Function = torch.compiler.disable(
        function, reason="Messages between ranks cannot be a part of a compiled graph."
    )
    return left_out


def group_of(mesh: Any, dim: Any) -> Any:
    """The process group of a mesh dimension, of a group itself, or of all processes.

    Raises
    ------
    UnsupportedError
        If torch.distributed has not been initialised.
    ArgumentError
        If mesh and dim do not name a group, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UnsupportedError(
            "torch.distributed is not initialised in this process.",
            action="Start the program with torchrun, and call "
            "torch.distributed.init_process_group() first.",
        )
    if hasattr(mesh, "get_group"):
        return _along(mesh, dim)
    if dim is not None:
        raise ArgumentError(
            f"dim={shown(dim)} names a dimension of a mesh, and mesh is {shown(mesh)}.",
            action="Pass the DeviceMesh that has it as mesh=, or leave dim out.",
        )
    group = dist.group.WORLD if mesh is None else mesh
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise _not_a_member("the process group that mesh is")
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            f"mesh={shown(mesh)} is neither a DeviceMesh nor a ProcessGroup.",
            action="Pass one of these, or leave it out for all processes.",
        )
    try:
        dist.get_rank(group)
    except ValueError as error:
        raise _destroyed("is") from error
    return group


def _along(mesh: Any, dim: Any) -> Any:
    """The group of a dimension of a mesh; `dim` may be left out of a mesh of one."""
    names = mesh.mesh_dim_names or ()
    given = dim is not None or mesh.ndim == 1
    is_place = is_integer(dim) and 0 <= dim < mesh.ndim
    if not given or not (dim is None or is_place or (isinstance(dim, str) and dim in names)):
        raise ArgumentError(
            f"dim={shown(dim)} does not name one dimension of the mesh.",
            [("dimensions of the mesh", f"{names or mesh.ndim}")],
            "Pass the name of the dimension along which the rows are spread.",
        )
    if mesh.get_coordinate() is None:
        raise _not_a_member("the mesh")
    try:
        return mesh.get_group(int(dim) if is_place else dim)
    except RuntimeError as error:
        raise _destroyed("has") from error


def _destroyed(verb: str) -> ArgumentError:
    return ArgumentError(
        f"mesh {verb} a process group that was destroyed.",
        action="Make a new one after torch.distributed.init_process_group().",
    )


def _not_a_member(what: str) -> ArgumentError:
    return ArgumentError(
        f"this process, rank {dist.get_rank()} of all, is not in {what}.",
        action="Make the call on the processes that are in it, and on no others.",
    )


@dataclass(slots=True)
class Links:
    """This rank's place in a group, and its messages to others.

    Attributes
    ----------
    group : ProcessGroup or None
        None is a group of this rank alone.
    timeout : float
        Seconds that one message may take.
    number : int
        Of the call that messages belong to, the same on all ranks. A rank that leaves out a
        backward pass would otherwise have its next message taken for one of that pass.
    last_number : int
        That of this process's last call, in any group.
    """

    last_number: ClassVar[int] = 0
    group: Any
    timeout: float = TIMEOUT
    number: int = 0
    rank: int = field(init=False)
    ranks: int = field(init=False)

    def __post_init__(self) -> None:
        self.timeout = checked_seconds(self.timeout)
        if self.group is None:
            self.rank, self.ranks = 0, 1
            return
        self.rank = dist.get_rank(self.group)
        self.ranks = dist.get_world_size(self.group)

    def exchange(self, sends: Mapping[int, Message], receives: Mapping[int, Message]) -> Pending:
        """Begin to send tensors, and to receive into others; both by rank of the group.

        The tensors are contiguous, and stay untouched until `wait` has returned.
        """
        operations = []
        peers = []
        for function, messages in ((dist.irecv, receives), (dist.isend, sends)):
            for peer in sorted(messages):
                message = messages[peer]
                there = dist.get_global_rank(self.group, peer)
                for tensor in (message,) if isinstance(message, torch.Tensor) else message:
                    if tensor.numel():
                        operations.append(
                            dist.P2POp(function, tensor, there, self.group, self.number)
                        )
                        peers.append(peer)
        if not operations:
            return Pending(self, (), ())
        works: list[Any] = []
        # NCCL's messages have to begin together. Gloo's begin one after the other in any case, and
        # if that is done here, the error names the rank whose link is closed, and no other.
        together = any(operation.tensor.device.type != "cpu" for operation in operations)
        size = len(operations) if together else 1
        for n in range(0, len(operations), size):
            try:
                works += dist.batch_isend_irecv(operations[n : n + size])
            except RuntimeError as error:
                raise self.failed(peers[n : n + size], 0.0, error) from error
        if len(works) != len(peers):  # One work for all, as NCCL gives it.
            peers = [-1] * len(works)
        return Pending(self, tuple(works), tuple(peers), (sends, receives))

    def all_to_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor of the same shape and type, in the order of ranks."""
        parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
        parts[self.rank] = tensor
        others = [peer for peer in range(self.ranks) if peer != self.rank]
        self.exchange(dict.fromkeys(others, tensor), {peer: parts[peer] for peer in others}).wait()
        return parts

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, added in the order of ranks, so that bits repeat."""
        total = torch.zeros_like(tensor)
        for part in self.all_to_all(tensor.contiguous()):
            total += part
        return total

    def failed(self, peers: Any, seconds: float, error: Exception) -> DistributedError:
        """The error for a message that did not arrive."""
        names = sorted({peer for peer in peers if peer >= 0})
        number = "rank" if len(names) == 1 else "ranks"
        who = f"{number} {', '.join(map(str, names))}" if names else "another rank"
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        slow = "imed out" in str(error) or "imeout" in str(error)
        if slow and seconds < self.timeout / 2:  # torch closes a link after a timeout.
            fact = f"did not answer rank {self.rank} in time in an earlier call"
        elif slow:
            fact = f"did not answer rank {self.rank} within {self.timeout:g} s"
        else:
            links = "their links" if len(names) > 1 else "its link"
            fact = f"closed {links} to rank {self.rank}"
        return DistributedError(
            f"{who} {fact}.",
            [
                ("waited", f"{seconds:.1f} s"),
                ("ranks in the group", self._in_words()),
                ("torch says", first_line[:200]),
            ],
            f"Look at the error of {who}, then start all ranks anew; the group is of no more use.",
        )

    def _in_words(self) -> str:
        """How many ranks the group has, and which they are of all processes, if not all."""
        if self.ranks == dist.get_world_size():
            return str(self.ranks)
        of_all = ", ".join(map(str, dist.get_process_group_ranks(self.group)))
        return f"{self.ranks}, which are ranks {of_all} of all processes"


@dataclass(frozen=True, slots=True)
class Pending:
    """Messages on their way."""

    links: Links
    works: tuple[Any, ...]
    peers: tuple[int, ...]
    tensors: Any = None
    """What is sent and received, whose memory must last as long."""

    def wait(self) -> None:
        """Return when all have arrived.

        Raises
        ------
        DistributedError
            If a rank has died or takes longer than the timeout; the message names it.
        """
        began = time.monotonic()
        limit = timedelta(seconds=self.links.timeout)
        for work, peer in zip(self.works, self.peers, strict=True):
            try:
                work.wait(limit)
            except RuntimeError as error:
                raise self.links.failed([peer], time.monotonic() - began, error) from error
