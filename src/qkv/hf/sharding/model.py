"""A model of transformers whose sequence is spread over ranks, for a while."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from qkv.arguments.declarations import shown
from qkv.distributed.messages.links import TIMEOUT, Links, group_of
from qkv.distributed.orders.order import Order
from qkv.errors import ArgumentError, UnsupportedError
from qkv.hf.inspection.switching import SPREAD, inner_model, switched
from qkv.hf.sharding.inputs import ShardedInputs
from qkv.hf.sharding.layers import (
    CURRENT,
    Sharding,
    attend_shard,
    find_documents_over_ranks,
    state_shard_mask,
)
from qkv.hf.sharding.rotary import rotated_as_whole

__all__ = ["sharded"]


@contextmanager
def sharded(
    model: Any,
    *,
    mesh: Any = None,
    dim: str | None = None,
    order: Order | None = None,
    strategy: str = "auto",
    timeout: float = TIMEOUT,
) -> Iterator[Any]:
    """A model whose sequence is spread over ranks: each calls it with its own tokens.

    Attention is over the rows of all ranks. Positions are those of the whole sequence, padding and
    packed sequences are read from all ranks' rows, and each label is that of the next token,
    wherever it is held. Every rank holds the whole model and calls it at the same time.

    Parameters
    ----------
    model : PreTrainedModel, or a module with one inside
        One that attends to a single sequence, and takes `position_ids`.
    mesh : DeviceMesh or ProcessGroup, optional
        All processes unless given.
    dim : str, optional
        Dimension of the mesh along which the sequence is spread.
    order : Order, optional
        Which tokens each rank holds; neighbouring ones in the order of ranks, unless given.
    strategy, timeout
        As for `qkv.distributed.attention`.

    Yields
    ------
    The model.

    Raises
    ------
    DistributedError
        If ranks call it with different things, or with what cannot be spread.
    UnsupportedError
        If a layer has dropout, a bias or a mask of its own, or if `backward()` runs afterwards.

    Notes
    -----
    `loss` of a causal language model is the sum over the rank's tokens, divided by the number of
    labels of *all* ranks: the losses of the ranks add up to that of the whole sequence, and so do
    the gradients of parameters. Activation checkpointing computes layers anew in `backward()`,
    which therefore belongs inside. `qkv.hf.inspect(model)` inside of it records the rank's rows.

    Examples
    --------
    In a program started by `torchrun --nproc-per-node 2`:

        torch.distributed.init_process_group("gloo")
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        order = qkv.distributed.Order.zigzag(ids.shape[1], ranks)
        own = order.shard(ids, rank, axis=-1)
        with qkv.hf.sharded(model, order=order):
            loss = model(own, labels=own).loss
            loss.backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)

    One process is all ranks that there are:

    >>> import torch, torch.distributed as dist, qkv.hf
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)).eval()
    >>> ids = torch.tensor([[1, 2, 3, 4]])
    >>> with qkv.hf.sharded(model):
    ...     loss = model(ids, labels=ids).loss
    >>> bool((loss - model(ids, labels=ids).loss).abs() < 1e-5)
    True
    >>> dist.destroy_process_group()
    """
    if isinstance(dim, tuple):
        raise ArgumentError(
            f"dim={shown(dim)} names two dimensions; a model is spread along one.",
            action="Name one, and use tensor parallelism for heads.",
        )
    AttentionInterface.register(SPREAD, attend_shard)
    AttentionMaskInterface.register(SPREAD, state_shard_mask)
    find_documents_over_ranks()
    inner = inner_model(model)
    inputs = ShardedInputs(Links(group_of(mesh, dim), timeout), order)
    options = {"mesh": mesh, "dim": dim, "strategy": strategy, "timeout": timeout}

    def before(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return (), inputs.read(module, args, kwargs)

    with ExitStack() as stack:
        stack.enter_context(switched(inner, SPREAD))
        stack.enter_context(_loss_over_ranks(inner, inputs))
        stack.enter_context(rotated_as_whole(inner, inputs))
        stack.callback(inner.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(CURRENT.reset, CURRENT.set(Sharding(inputs, options, inner)))
        yield model


@contextmanager
def _loss_over_ranks(model: Any, inputs: ShardedInputs) -> Iterator[None]:
    """The model's loss, of each rank's tokens with the labels of those behind them."""
    if "labels" not in inspect.signature(model.forward).parameters:
        yield
        return
    plain: Callable[..., Any] = model.loss_function

    def loss(*args: Any, **kwargs: Any) -> Any:
        kwargs["shift_labels"], inputs.next_labels = inputs.next_labels, None
        if kwargs.get("num_items_in_batch") is None:
            kwargs["num_items_in_batch"] = max(inputs.label_count, 1)
        return plain(*args, **kwargs)

    def after(module: torch.nn.Module, *_: Any) -> None:
        if inputs.next_labels is not None:
            raise UnsupportedError(
                f"{type(module).__name__} computes a loss that cannot be spread over ranks.",
                action="Leave labels out, and compute the loss from the logits.",
            )

    with ExitStack() as stack:
        stack.callback(model.register_forward_hook(after).remove)
        if getattr(plain, "__name__", "") == "ForCausalLMLoss":
            own = vars(model).get("_loss_function")
            stack.callback(_restore_loss, model, own)
            model.loss_function = loss
        yield


def _restore_loss(model: Any, own: Any) -> None:
    if own is None:
        del model._loss_function
    else:
        model.loss_function = own
