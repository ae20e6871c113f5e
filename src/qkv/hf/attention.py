"""The attention function that transformers calls, once per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import output_capturing

import qkv
from qkv.bridges.torch.operands import autocast
from qkv.errors import DTypeError, UnsupportedError
from qkv.hf.ignored_keywords import refuse_unread
from qkv.hf.layer_call import LayerCall
from qkv.hf.layer_weights import LayerWeights, weights_of
from qkv.hf.masks import StatedMask
from qkv.hf.packed_rows import packed_rows
from qkv.hf.prepared_layers import LayerKind, PreparedLayers, prepare_layer, run_layer
from qkv.hf.stored_tensor import over_rows

__all__ = [
    "Observer", "OutputChange", "attend", "change_outputs", "changes_outputs", "observe",
]  # fmt: skip

Observer = Callable[[LayerCall], None]
OutputChange = Callable[[LayerCall, torch.Tensor], torch.Tensor]


def attend(
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
    output_attentions: bool = False,
    cache: Any = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, LayerWeights | None]:
    """Attention of one layer, as transformers' `AttentionInterface` asks for it.

        s[i, j] = softcap(scaling * q[i] . k[j]) + position_bias[i, j],   sinks `s_aux` beside them

    over the pairs that the mask allows.

    Parameters
    ----------
    module : torch.nn.Module
        The layer; its `is_causal` is read when neither mask nor `is_causal` says anything.
    query : tensor (batch, num_heads, q_len, head_dim)
    key, value : tensor (batch, num_kv_heads, kv_len, head_dim)
        Not repeated.
    attention_mask : StatedMask, boolean tensor (True = may attend), floating tensor, or None
        A floating one is added to the scores.
    dropout : float
        Probability; the seed is drawn from torch's default generator.
    scaling : float, optional
        `head_dim ** -0.5` unless given.
    is_causal : bool, optional
        Holds without a mask. Several query rows then start at key 0; one row is the last key's, and
        attends to all.
    softcap, s_aux, position_bias : optional
        Bound on the scores; sink logits (num_heads,); a bias that broadcasts to
        (batch, num_heads, q_len, kv_len).
    output_attentions : bool
        Return the weights, computed where they are read.
    cache : optional
        Pages of transformers' continuous batching, which are refused.
    cu_seq_lens_q, cu_seq_lens_k : tensor, optional
        Cumulative lengths of sequences that are packed into one row.
    **kwargs
        What models hand to every layer for other parts and other kernels; it is not read, since
        what it says (a sliding window) is in the mask. Anything else is refused.

    Returns
    -------
    (tensor (batch, q_len, num_heads, v_head_dim), LayerWeights or None)

    Raises
    ------
    DTypeError
        The mask holds integers.
    UnsupportedError
        A keyword that is not known to be without effect, such as the `indices` of layers that
        choose keys for each query, or sinks of each query; or packed sequences beside padding or
        earlier tokens.
    """
    if cache is not None:
        raise UnsupportedError(
            "continuous batching keeps keys in pages of its own; qkv is not called through those.",
            action='Use attn_implementation="sdpa" with generate_batch.',
        )
    refuse_unread(module, kwargs, key.shape[2])
    wanted = output_attentions or _attentions_collected()
    lengths = query.shape[2], key.shape[2]
    layers = kind = None
    if not (dropout or wanted or _observers or _changes or cu_seq_lens_q is not None):
        layers = _prepared_layers(attention_mask, lengths)
    if layers is not None:
        kind = LayerKind.of(scaling, softcap, position_bias, s_aux)
    if layers is not None and kind is not None:
        position = lengths[1] - 1
        if isinstance(attention_mask, StatedMask):
            position = attention_mask.pattern.q_offset
        out = run_layer(layers, kind, position, (query, key, value), position_bias)
        if out is not None:
            return out, None
    variants: list[Any] = []
    if softcap is not None:
        variants.append(qkv.Softcap(softcap))
    if position_bias is not None:
        variants.append(qkv.Bias(position_bias))
    if s_aux is not None:
        variants.append(qkv.Sinks(s_aux))
    if dropout > 0:
        variants.append(qkv.Dropout(dropout, _draw_seed()))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    masks, q_offset, kv_offset = _masks_and_offsets(attention_mask, causal, lengths)
    if cu_seq_lens_q is not None:
        lengths_of_rows = cu_seq_lens_q, cu_seq_lens_k
        masks += packed_rows(lengths_of_rows, masks, query, key, causal=causal)
    masks = tuple([over_rows(m, key) if isinstance(m, torch.Tensor) else m for m in masks])
    # Rotated queries and keys are float32 under autocast, and values are not.
    query, key, value = autocast(query, key, value)
    call = LayerCall(module, query, key, value, (*variants, *masks), scaling, q_offset, kv_offset)
    if layers is not None and kind is not None:
        out = prepare_layer(layers, kind, call)
        if out is not None:
            return out, None
    if _observers:
        call = call.watched()
    # Other threads begin and end observations meanwhile, which must not hide one from this loop.
    for observer in tuple(_observers):
        observer(call)
    out = call.output()
    for change in tuple(_changes):
        out = change(call, out)
    return out, weights_of(call) if wanted else None


_unmasked_layers: PreparedLayers = {}
"""Layers of one token that attends to every key."""


def _prepared_layers(mask: Any, lengths: tuple[int, int]) -> PreparedLayers | None:
    """The prepared calls of layers with this mask, in a decoding step of one token."""
    if torch.compiler.is_compiling() or lengths[0] != 1:
        return None
    if mask is None:
        return _unmasked_layers
    if not isinstance(mask, StatedMask) or mask.pattern.materialized is not None:
        return None
    # Layers of other lengths are not like the ones that a call was prepared for.
    return mask.pattern.layers if tuple(mask.shape[2:]) == lengths else None


def _draw_seed() -> Any:
    """The dropout seed of one call, from torch's default generator."""
    drawn = torch.randint(2**63 - 1, (), device="cpu")
    # Under torch.compile the seed stays a tensor, because a number would break the graph.
    return drawn if torch.compiler.is_compiling() else int(drawn)


def _masks_and_offsets(
    given: torch.Tensor | None, causal: bool, lengths: tuple[int, int]
) -> tuple[tuple[Any, ...], int, int]:
    """Masks of a call, and the offsets that they count from; `causal` holds if none is given.

    One query row without a mask is the last token of its cache, if attention is causal.
    """
    if given is None and lengths[0] == 1:
        return (), lengths[1] - 1 if causal else 0, 0
    if given is None:
        return (qkv.Causal(),) if causal else (), 0, 0
    if not isinstance(given, StatedMask):
        _require_mask_type(given)
        return (given,), 0, 0
    pattern = given.pattern
    # A mask that allows every pair holds for any lengths.
    fits = tuple(given.shape[2:]) == lengths or not pattern.variants
    if not fits:
        return (pattern.dense(),), 0, 0
    masks = None if pattern.materialized is None else (pattern.dense(),)
    if _observers and pattern.from_first_token is not None:
        # Observers read positions.
        pattern = pattern.from_first_token()
    return masks or pattern.variants, pattern.q_offset, pattern.kv_offset


def _require_mask_type(mask: torch.Tensor) -> None:
    """Refuse a mask of integers, which could mean both."""
    if mask.dtype is torch.bool or mask.is_floating_point():
        return
    raise DTypeError(
        f"the attention mask of a layer is {mask.dtype}; a boolean one says which pairs may "
        "attend, a floating one is added to scores.",
        [("attention_mask", f"{mask.dtype} {tuple(mask.shape)}")],
        "Pass attention_mask.to(torch.bool) to the model, if 1 means that a pair may attend.",
    )


def _attentions_collected() -> bool:
    """Whether transformers collects attentions; some models tell only its output collector."""
    collector = getattr(output_capturing, "_active_collector", None)
    keys = (collector.get() if collector is not None else None) or ()
    return any(key.endswith("attentions") for key in keys)


_observers: list[Observer] = []


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call `observer` with every `LayerCall`, before it is computed.

    Examples
    --------
    >>> import torch, qkv.hf
    >>> from transformers import GPT2Config, GPT2Model
    >>> qkv.hf.enable()
    >>> model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2))
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> model.set_attn_implementation("qkv")
    >>> calls = []
    >>> with qkv.hf.observe(calls.append):
    ...     output = model(ids)
    >>> len(calls), calls[0].query.shape
    (1, torch.Size([1, 2, 3, 4]))
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


_changes: list[OutputChange] = []


def changes_outputs() -> bool:
    """Whether something changes what layers give."""
    return bool(_changes)


@contextmanager
def change_outputs(change: OutputChange) -> Iterator[None]:
    """Let `change` see every `LayerCall` with its output, and give the output that counts."""
    _changes.append(change)
    try:
        yield
    finally:
        _changes.remove(change)
