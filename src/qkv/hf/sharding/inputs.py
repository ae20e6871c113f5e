"""Inputs of a model that holds some rows of a sequence: what depends on the rows of other ranks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch

from qkv.distributed.messages.agreement import compare, tell
from qkv.distributed.messages.links import Links
from qkv.distributed.orders.order import Order

__all__ = ["ShardedInputs"]

Tensor = torch.Tensor

IGNORED = -100
"""The label of tokens that are not part of the loss, as in torch."""


@dataclass(slots=True)
class ShardedInputs:
    """The arguments of one call of a model, read from all ranks.

    Attributes
    ----------
    links : Links
        The ranks.
    wanted : Order or None
        The order that the caller chose.
    order : Order
        That of this call.
    padding : Tensor or None
        (batch, whole length), False for padding; None without any.
    documents : Tensor or None
        (batch, whole length), the number of the packed sequence that each row belongs to: where
        positions do not go on, another begins. None if they always do, or with padding.
    next_labels : Tensor or None
        (batch, own rows), the label of the row behind each, wherever that row is held.
    label_count : int
        How many rows of all ranks have such a label.
    last_position : int
        The largest of all ranks' rows.
    """

    links: Links
    wanted: Order | None
    order: Order = field(init=False)
    padding: Tensor | None = None
    documents: Tensor | None = None
    next_labels: Tensor | None = None
    label_count: int = 0
    last_position: int = 0

    def read(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords with which this rank's rows are rows of the whole sequence.

        Raises
        ------
        DistributedError
            On every rank, if ranks differ or one of them was called with what cannot be spread.
        """
        accepted = [*inspect.signature(module.forward).parameters]
        given = {**dict(zip(accepted, args, strict=False)), **kwargs}
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        said: dict[str, Any] = {"own error": _problem(module, accepted, given, tokens)}
        if isinstance(tokens, Tensor):
            said |= {"own rows": tokens.shape[1], "batch": tokens.shape[0]}
            said["own error"] = said["own error"] or self._unlike_order(tokens.shape[1])
        names = ("attention_mask", "position_ids", "labels")
        said["inputs"] = [name for name in names if given.get(name) is not None]
        positions = given.get("position_ids")
        if isinstance(positions, Tensor) and positions.numel():
            said["own last position"] = int(positions.max())
        device = tokens.device if isinstance(tokens, Tensor) else torch.device("cpu")
        everyone = tell(self.links, said, device)
        compare(everyone)
        sizes = [of["own rows"] for of in everyone]
        self.order = Order.of_sizes(sizes) if self.wanted is None else self.wanted
        last = [of["own last position"] for of in everyone if "own last position" in of]
        self.last_position = max(last, default=self.order.length - 1)
        given["position_ids"] = self._positions(given, tokens)
        self._read_masks(given)
        self._read_labels(given)
        if "use_cache" in accepted:
            given["use_cache"] = False  # It would hold keys of this rank's rows alone.
        return given

    def _unlike_order(self, rows: int) -> str:
        """What is wrong with the order for this rank and its rows; empty if nothing is."""
        order, links = self.wanted, self.links
        if order is None:
            return ""
        if order.ranks != links.ranks:
            return f"the order is of {order.ranks} ranks; the model is spread over {links.ranks}."
        if order.rows(links.rank) != rows:
            given = order.rows(links.rank)
            return f"the order gives it {given} rows; the model is called with {rows}."
        return ""

    def gathered(self, own: Tensor) -> Tensor:
        """`(batch, whole length)` of every rank's `(batch, own rows)`, as int64."""
        links = self.links
        shards = [
            torch.empty((own.shape[0], self.order.rows(rank)), dtype=torch.int64, device=own.device)
            for rank in range(links.ranks)
        ]
        shards[links.rank] = own.to(torch.int64).contiguous()
        others = [rank for rank in range(links.ranks) if rank != links.rank]
        sends = dict.fromkeys(others, shards[links.rank])
        links.exchange(sends, {rank: shards[rank] for rank in others}).wait()
        whole: Tensor = self.order.unshard(shards, axis=-1)
        return whole

    def _positions(self, given: dict[str, Any], tokens: Any) -> Tensor:
        positions = given.get("position_ids")
        if isinstance(positions, Tensor):
            return positions
        rows = torch.from_numpy(self.order.position_ids(self.links.rank)).to(tokens.device)
        return rows[None].expand(tokens.shape[0], -1)

    def _read_masks(self, given: dict[str, Any]) -> None:
        self.padding = self.documents = None
        mask, positions = given.get("attention_mask"), given["position_ids"]
        if mask is not None:
            whole = self.gathered(mask).bool()
            self.padding = None if bool(whole.all()) else whole
        elif positions.ndim == 2:
            whole = self.gathered(positions)
            starts = whole.diff(dim=-1, prepend=whole[:, :1] - 1) != 1
            self.documents = starts.cumsum(-1) if bool(starts.any()) else None

    def _read_labels(self, given: dict[str, Any]) -> None:
        self.next_labels, labels = None, given.get("labels")
        if labels is None:
            return
        whole = torch.nn.functional.pad(self.gathered(labels)[:, 1:], (0, 1), value=IGNORED)
        self.label_count = int((whole != IGNORED).sum())
        self.next_labels = self.order.shard(whole, self.links.rank, axis=-1)


def _problem(
    module: torch.nn.Module, accepted: list[str], given: dict[str, Any], tokens: Any
) -> str:
    """Why a call cannot be spread over ranks; empty if it can."""
    kind, cache = type(module).__name__, given.get("past_key_values")
    mask, labels = given.get("attention_mask"), given.get("labels")
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return f"{kind} reads two sequences; only one can be spread over ranks."
    if not isinstance(tokens, Tensor):
        return f"{kind} is called without input_ids or inputs_embeds."
    if not tokens.shape[1]:
        return f"{kind} is called with 0 tokens; every rank must hold one or more."
    if "position_ids" not in accepted:
        return f"{kind} takes no position_ids, so that it counts the rows of each rank from 0."
    if given.get("position_ids") is None and _counts_by_itself(module):
        return f"{kind} counts positions by its padding; pass position_ids of the whole sequence."
    if cache is not None and cache.get_seq_length():
        return "past_key_values hold keys of this rank's rows alone; see qkv.distributed.decode."
    if given.get("output_attentions"):
        return "output_attentions asks for weights that no rank holds; see qkv.distributed.inspect."
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != tokens.shape[:2]):
        return f"attention_mask must be {tuple(tokens.shape[:2])}, of this rank's rows."
    if labels is not None and labels.shape != tokens.shape[:2]:
        return f"labels must be {tuple(tokens.shape[:2])}, of this rank's rows."
    return ""


def _counts_by_itself(module: torch.nn.Module) -> bool:
    """Whether positions depend on which tokens are padding, as in RoBERTa and OPT."""
    return any(
        hasattr(part, "create_position_ids_from_input_ids")
        or (
            isinstance(part, torch.nn.Embedding)
            and "attention_mask" in inspect.signature(part.forward).parameters
        )
        for part in module.modules()
    )
