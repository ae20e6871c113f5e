"""Masks without storage, which replace the boolean tensors of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from qkv._dynamo import constant_result
from qkv.errors import UnsupportedError
from qkv.hf.mask_functions import PositionRanges, read
from qkv.hf.prepared_layers import PreparedLayers, are_of_distances, layers_of
from qkv.variants import Causal, KeyLengths, Mask, MaskVariant, Prefix

__all__ = ["MaskPattern", "StatedMask", "padding_masks", "state_mask"]


@dataclass(slots=True)
class MaskPattern:
    """The pairs that a mask allows.

    Attributes
    ----------
    variants : tuple of masks
        Their intersection is the mask.
    q_offset, kv_offset : int
        Positions of the first query row and the first key row, as the variants count them.
    make : callable
        Makes the dense tensor, boolean or, for models that expect it, as eager attention adds it
        to scores.
    materialized : tensor or None
        That tensor, after `materialize` has returned it.
    layers : dict of LayerKind to PreparedLayer
        The prepared calls of layers that decode with this mask.
    from_first_token : callable or None
        Makes the pattern that counts positions from the first token, where this one counts them
        from the first key that a cache still holds.
    """

    variants: tuple[MaskVariant, ...]
    q_offset: int
    kv_offset: int
    make: Callable[[], torch.Tensor]
    materialized: torch.Tensor | None = None
    layers: PreparedLayers = field(default_factory=dict)
    from_first_token: Callable[[], MaskPattern] | None = None

    def dense(self) -> torch.Tensor:
        """The dense tensor."""
        return self.make() if self.materialized is None else self.materialized

    def materialize(self) -> torch.Tensor:
        """The dense tensor for code that may write to it; from now on it defines the mask."""
        self.materialized = self.dense()
        return self.materialized


class StatedMask(torch.Tensor):
    """A mask (batch, 1, q_len, kv_len) without memory of that size.

    To a model it is a tensor: it has shape, dtype and device and can be passed on, and whoever
    computes with it, or writes to it, gets the dense tensor, made at that moment. `attend` takes it
    as what it is: the masks in `pattern`.

    The dense tensor is boolean, True = may attend, as transformers hands it to "sdpa". Models that
    do not support "sdpa" have never been given one, and may take it for numbers that are added to
    scores, as DeepSeek V4 does. They get what "eager" hands out: 0, and the least number of a type
    where a pair is forbidden.

    Raises
    ------
    UnsupportedError
        When it is added to scores, which is what models do that compute attention themselves: they
        never call "qkv", and the sum with a boolean would be a wrong result without an error.

    Notes
    -----
    Memory: O(batch * kv_len) for padding, nothing for the rest; the dense tensor takes
    `batch * q_len * kv_len` bytes.

    Examples
    --------
    >>> from qkv.hf.masks import state_mask
    >>> mask = state_mask(batch_size=1, q_length=3, kv_length=3)
    >>> mask, mask.all(-1)
    (StatedMask(Causal(), shape=(1, 1, 3, 3), q_offset=0), tensor([[[False, False,  True]]]))
    """

    pattern: MaskPattern

    # torch documents this assignment for subclasses; its type stubs declare a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        device: torch.device | str,
        pattern: MaskPattern,
        dtype: torch.dtype = torch.bool,
    ) -> StatedMask:
        """A tensor without storage."""
        mask: StatedMask = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=torch.device(device)
        )
        mask.pattern = pattern
        return mask

    # torch passes `tensor_contents` by name, which its type stubs do not declare.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        variants = " & ".join(map(repr, self.pattern.variants)) or "every pair"
        return (
            f"StatedMask({variants}, shape={tuple(self.shape)}, q_offset={self.pattern.q_offset})"
        )

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.pattern.dense().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        dense: Any = self.pattern.dense()
        return dense.__reduce_ex__(protocol)

    # torch calls this on the class, which its type stubs do not declare.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _IDENTITY_OPS or (func is _ATEN.slice.Tensor and _is_full_slice(*args)):
            given = args[0]
            return cls(tuple(given.shape), given.device, given.pattern, given.dtype)
        if func in _ADDITIONS:
            raise UnsupportedError(
                "a model adds its attention mask to scores of its own: it computes attention "
                'itself and never calls the implementation "qkv".',
                [("mask", repr(next(a for a in args if isinstance(a, StatedMask))))],
                'Load this model with attn_implementation="eager".',
            )
        writable = any(argument.alias_info for argument in func._schema.arguments)

        def dense(mask: StatedMask) -> torch.Tensor:
            return mask.pattern.materialize() if writable else mask.pattern.dense()

        args, kwargs = tree_map_only(StatedMask, dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_full_slice(
    mask: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> bool:
    """A slice of everything."""
    return not start and step == 1 and (end is None or end >= mask.shape[dim])


_ATEN = torch.ops.aten
_IDENTITY_OPS = {_ATEN.alias.default, _ATEN.detach.default}
_ADDITIONS = {_ATEN.add.Tensor, _ATEN.add_.Tensor, _ATEN.sub.Tensor, _ATEN.sub_.Tensor}


def state_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask that transformers asks for, as a `StatedMask` wherever that is possible.

    A function that is registered with transformers' `AttentionMaskInterface`.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
        Shape of the mask, `(batch_size, 1, q_length, kv_length)`.
    q_offset, kv_offset : int
        Positions of the first query row and the first key row.
    mask_function : callable (batch, head, q_pos, kv_pos) -> bool
        Which pairs are allowed.
    attention_mask : tensor (batch_size, number of keys so far), optional
        Zero for keys that are padding.
    dtype : torch.dtype
        That of the scores.
    config : transformers.PreTrainedConfig, optional
        Of the model, which says whether it expects a boolean mask.
    **kwargs
        Whatever else transformers says to implementations of its own.

    Returns
    -------
    StatedMask, tensor or None
        The dense tensor of transformers' "sdpa" or "eager" where the mask function is not one that
        is known, and while torch traces the model, when no value can be read. None then, or for
        one token that sees every key.
    """
    is_traced = torch.compiler.is_compiling() or _is_traced(attention_mask) or _is_traced(q_offset)
    if not is_traced:
        # A static cache passes its own counter tensor, which it changes in place later.
        q_offset = int(q_offset)
        if (
            q_length == 1
            and q_offset == kv_length - 1
            and not kv_offset
            and mask_function is causal_mask_function
            and kwargs.get("allow_is_causal_skip", True)
            and (attention_mask is None or _keeps_all(attention_mask, kv_length))
        ):
            return None
        kwargs = {"use_vmap": kwargs.get("use_vmap", False), "allow_is_causal_skip": False}
    added = None if _expects_booleans(type(config)) else dtype
    dense: Callable[..., Any] = partial(
        _dense_mask,
        added,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **kwargs,
    )
    if is_traced:
        traced: torch.Tensor | None = dense()
        return traced
    rows = PositionRanges(
        range(q_offset, q_offset + q_length), range(kv_offset, kv_offset + kv_length)
    )
    variants = read(mask_function, rows)
    if variants is None:
        mask: torch.Tensor = dense()
        return mask
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    # Functions that were read take arrays of positions. vmap does not run where an operation of a
    # tensor subclass is dispatched, which is where the dense tensor may be asked for.
    make = partial(dense, use_vmap=False)

    def counted_from(first_key: int) -> MaskPattern:
        """The pattern in which the first key has this position."""
        masks = variants
        if padding is not None:
            last_key = rows.key.stop
            if any(isinstance(mask, Causal) for mask in variants):
                last_key = min(last_key, rows.query.stop)
            key_range = range(kv_offset, max(last_key, kv_offset))
            masks += padding_masks(padding, key_range, kv_length, first_key)
        return MaskPattern(masks, q_offset - kv_offset + first_key, first_key, make)

    # The cache of a window drops its first keys, so that positions would change with every step.
    first_key = 0 if are_of_distances(variants) else kv_offset
    pattern = counted_from(first_key)
    if q_length == 1:
        pattern.layers = layers_of(pattern.variants, first_key)
    if first_key != kv_offset:
        pattern.from_first_token = partial(counted_from, kv_offset)
    shape = (batch_size, 1, q_length, kv_length)
    return StatedMask(shape, device, pattern, added or torch.bool)


_boolean: dict[type, bool] = {}
"""What is known of configurations."""


@constant_result
def _expects_booleans(config: type) -> bool:
    """Whether models with such a configuration can be given the boolean masks of "sdpa".

    Dynamo runs this: it would compile a model again if it read that nothing is known yet.
    """
    known = _boolean.get(config)
    if known is not None:
        return known
    models = _models_with(config)
    all_boolean = all(model._supports_sdpa for model in models)
    # Without a model of that kind nothing is known yet: transformers imports them one by one.
    if models:
        _boolean[config] = all_boolean
    return all_boolean


def _models_with(config: type) -> list[Any]:
    classes = [PreTrainedModel]
    for known in classes:
        classes += known.__subclasses__()
    return [known for known in classes if getattr(known, "config_class", None) is config]


def _dense_mask(added: torch.dtype | None, **kwargs: Any) -> torch.Tensor | None:
    """The boolean mask; with a type, what is added to scores of that type."""
    allowed: torch.Tensor | None = sdpa_mask(**kwargs)
    if added is None or allowed is None:
        return allowed
    lowest = torch.full((), torch.finfo(added).min, dtype=added, device=allowed.device)
    return torch.where(allowed, torch.zeros_like(lowest), lowest)


def _is_traced(value: Any) -> bool:
    """Whether torch follows what becomes of a value, so that it cannot be read."""
    if not isinstance(value, torch.Tensor):
        return False
    if type(value) is torch.Tensor and value.is_cpu:
        return torch._C._get_tracing_state() is not None
    return bool(is_tracing(value))


def _keeps_all(attention_mask: torch.Tensor, kv_length: int) -> bool:
    """Whether no key is padding."""
    return attention_mask.shape[-1] == kv_length and bool(attention_mask.all())


def padding_masks(
    padding: torch.Tensor, key_range: range, kv_length: int, first_key: int
) -> tuple[MaskVariant, ...]:
    """Masks for `padding` (batch, positions), False for padded keys, of those in `key_range`.

    Padding at the ends becomes `KeyLengths` and `Prefix`, so that its tiles are skipped.
    `first_key` is the position that the masks give to the first key.
    """
    keys = padding
    if len(key_range) != padding.shape[1]:
        keys = padding[:, key_range.start : key_range.stop]
    if keys.all():
        return ()
    ends = (keys * torch.arange(1, len(key_range) + 1, device=keys.device)).amax(-1)
    starts = keys.int().argmax(-1)
    if not torch.equal((ends - starts).clamp_min(0), keys.sum(-1)):
        return (Mask(padding[:, None, None, key_range.start : key_range.start + kv_length]),)
    masks: tuple[MaskVariant, ...] = ()
    if bool((ends < len(key_range)).any()):
        masks += (KeyLengths(ends),)
    if bool((starts > 0).any()):
        masks += (~Prefix(first_key + starts),)
    return masks
