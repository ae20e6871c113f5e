"""The attention function and the mask function of a model whose sequence is spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NoReturn

import torch
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function

import qkv
from qkv.bridges.torch.operands import autocast
from qkv.distributed import attention
from qkv.errors import UnsupportedError
from qkv.hf.attention import Observer, changes_outputs
from qkv.hf.ignored_keywords import refuse_unread
from qkv.hf.layer_call import LayerCall
from qkv.hf.mask_functions import PositionRanges, read
from qkv.hf.masks import MaskPattern, StatedMask, padding_masks
from qkv.hf.sharding.inputs import ShardedInputs
from qkv.variants import MaskVariant, Segments
from qkv.variants.masks.same_group import SameGroup

__all__ = [
    "CURRENT", "Sharding", "attend_shard", "find_documents_over_ranks", "sharding_of",
    "state_shard_mask",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the model that runs is spread, and what it was called with.

    Attributes
    ----------
    inputs : ShardedInputs
    options : dict
        `mesh`, `dim`, `strategy` and `timeout` of `qkv.distributed.attention`.
    model : torch.nn.Module
    observers : list of callable
        Called with the `LayerCall` of each layer: tensors of this rank, variants of the whole.
    """

    inputs: ShardedInputs
    options: dict[str, Any]
    model: torch.nn.Module
    observers: list[Observer] = field(default_factory=list)

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Call `observer` with every layer's call, before it is computed."""
        self.observers.append(observer)
        try:
            yield
        finally:
            self.observers.remove(observer)

    def padding(self) -> tuple[MaskVariant, ...]:
        """Masks of the padding of the whole sequence."""
        padding, length = self.inputs.padding, self.inputs.order.length
        return () if padding is None else padding_masks(padding, range(length), length, 0)

    def own_documents(self) -> torch.Tensor | None:
        """Numbers of the packed sequences of this rank's rows, None if all are of one."""
        documents, inputs = self.inputs.documents, self.inputs
        if documents is None:
            return None
        own: torch.Tensor = inputs.order.shard(documents, inputs.links.rank, axis=-1)
        return own


CURRENT: ContextVar[Sharding | None] = ContextVar("qkv.hf.sharded", default=None)
"""The model that runs in this thread."""


def sharding_of(model: torch.nn.Module) -> Sharding | None:
    """How a model is spread in this thread; None if it is not."""
    sharding = CURRENT.get()
    return sharding if sharding is not None and sharding.model is model else None


def attend_shard(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`qkv.distributed.attention` of one layer, as `AttentionInterface` asks for it."""
    refuse_unread(module, kwargs, key.shape[2])
    sharding = _current()
    if changes_outputs():
        _refuse(module, "has heads that qkv.hf.intervene changes", "Change them in one process.")
    if dropout:
        _refuse(module, f"drops weights with probability {dropout:g}", "Set attention_dropout=0.")
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        _refuse(module, "gets cu_seq_lens_q", "Pass position_ids that begin anew, without it.")
    if position_bias is not None:
        _refuse(module, "makes a bias of each rank's rows", "Use a model that rotates positions.")
    if attention_mask is not None and not isinstance(attention_mask, StatedMask):
        _refuse(module, "makes a mask of each rank's rows", "Run it in one process.")
    variants: list[Any] = []
    if softcap is not None:
        variants.append(qkv.Softcap(softcap))
    if s_aux is not None:
        variants.append(qkv.Sinks(_own_share(s_aux, sharding.inputs.links.ranks)))
    if isinstance(attention_mask, StatedMask):
        variants += attention_mask.pattern.variants
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        variants += [*([qkv.Causal()] if causal else []), *sharding.padding()]
    # Rotated queries and keys are float32 under autocast, and values are not.
    query, key, value = autocast(query, key, value)
    for observer in sharding.observers:
        call = LayerCall(module, query, key, value, tuple(variants), scaling, 0, 0)
        observer(call)
    out = attention(
        query, key, value, *variants,
        scale=scaling, order=sharding.inputs.order, **sharding.options,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def state_shard_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor:
    """The mask of the *whole* sequence, as a tensor of this rank's shape that cannot be computed.

    Packed sequences and padding are read from the inputs of all ranks; what transformers makes of
    this rank's rows says only that there are some.
    """
    sharding = _current()
    length = sharding.inputs.order.length
    variants = read(mask_function, PositionRanges(range(length), range(length)))
    if variants is None or any(isinstance(variant, SameGroup) for variant in variants):
        raise UnsupportedError(
            "the model has a mask function that is not known to hold for other ranks' rows.",
            [("mask function", getattr(mask_function, "__qualname__", repr(mask_function)))],
            "Run it in one process, or call qkv.distributed.attention with the mask.",
        )
    documents = sharding.inputs.documents
    masks = [variant for variant in variants if not isinstance(variant, Segments)]
    if len(masks) < len(variants) and documents is not None:
        masks.append(Segments(documents))
    pattern = MaskPattern((*masks, *sharding.padding()), 0, 0, _make_nothing)
    return StatedMask((batch_size, 1, q_length, kv_length), device, pattern)


def find_documents_over_ranks() -> None:
    """Let transformers find packed sequences as they lie over all ranks, where a model is spread.

    It looks for them in the positions of this rank's rows, which do not go on at the ends of runs.
    The function is replaced once and for all, since models of several threads share it.
    """
    plain = masking_utils.find_packed_sequence_indices
    if getattr(plain, "_qkv_over_ranks", False):
        return

    @wraps(plain)
    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        sharding = CURRENT.get()
        documents: torch.Tensor | None
        documents = plain(position_ids) if sharding is None else sharding.own_documents()
        return documents

    find._qkv_over_ranks = True  # type: ignore[attr-defined]  # mypy knows no such attributes.
    masking_utils.find_packed_sequence_indices = find


def _own_share(parameter: torch.Tensor, ranks: int) -> torch.Tensor:
    """The parameter, with one share of its gradient, which is the whole on every rank.

    Gradients of a model's parameters are added up over ranks.
    """
    same = parameter.view_as(parameter)
    if same.requires_grad:
        same.register_hook(lambda gradient: gradient / ranks)
    return same


def _make_nothing() -> NoReturn:
    raise UnsupportedError(
        "a model reads the mask of a sequence that is spread over ranks.",
        action="Stay inside of qkv.hf.sharded(...) until backward() is done; a model that computes "
        "with its mask must run in one process.",
    )


def _current() -> Sharding:
    current = CURRENT.get()
    if current is None:
        raise UnsupportedError(
            'the attention "qkv_sharded" runs outside of qkv.hf.sharded(...).',
            action="Call the model, and backward(), inside of it and in the same thread.",
        )
    return current


def _refuse(module: torch.nn.Module, does: str, action: str) -> NoReturn:
    raise UnsupportedError(
        f"{type(module).__name__} {does}, which a sequence spread over ranks cannot have.",
        action=action,
    )
