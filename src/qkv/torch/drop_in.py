"""torch's own attention, name for name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import qkv
from qkv.arguments.readable_checks import checked_flag
from qkv.call.binding.unknown_keywords import drop_in_error, with_signature_of_theirs
from qkv.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError

__all__ = ["scaled_dot_product_attention"]


@with_signature_of_theirs
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: Any,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with its signature and meaning.

        softmax(scale * query @ key.mT + mask) @ value

    Parameters
    ----------
    query : Tensor (..., num_heads, q_len, head_dim)
    key : Tensor (..., num_kv_heads, kv_len, head_dim)
    value : Tensor (..., num_kv_heads, kv_len, v_head_dim)
        Leading dimensions, heads among them, broadcast. With head_dim 0 all scores are 0.
    attn_mask : Tensor that broadcasts to (..., num_heads, q_len, kv_len), optional
        Boolean (True = may attend) or floating (added to the scores; differentiable), or one of
        `torch.nn.attention.bias`. With `is_causal`, both hold.
    dropout_p : float
        Probability of dropping a weight, whether training or not; seeded by torch's generator,
        which gives other masks than torch's own. At 1 the output is 0.
    is_causal : bool
        Row i of query sees keys 0 to i, counted from the top left.
    scale : float, optional
        `head_dim ** -0.5` unless given.
    enable_gqa : bool
        Allow fewer heads in key and value; query head h reads kv head `h // group_size`. Where
        key and value differ in heads, each is repeated to those of query, in a copy.

    Returns
    -------
    Tensor (..., num_heads, q_len, v_head_dim)
        A row that may attend to nothing is 0, and no NaN comes from behind a mask.

    Raises
    ------
    KeywordError
        A keyword of another library; the message has the call to write.
    ShapeError
        Where torch raises, and also where key and value differ in length, which torch accepts
        and reads out of step.

    Notes
    -----
    O(q_len + kv_len) memory for every argument, forward and backward; cost as of `qkv.attention`.

    Examples
    --------
    >>> import torch, qkv.torch
    >>> x = torch.eye(2).expand(1, 1, 2, 2)
    >>> qkv.torch.scaled_dot_product_attention(x, x, x, is_causal=True)[0, 0, 0]
    tensor([1., 0.])
    """
    if unknown:
        said = {
            "attn_mask": attn_mask, "dropout_p": dropout_p or None, "is_causal": is_causal,
            "scale": scale, "enable_gqa": enable_gqa,
        }  # fmt: skip
        raise drop_in_error("scaled_dot_product_attention", unknown, said, list(said))
    inputs = query, key, value
    for name, given in zip(("query", "key", "value"), inputs, strict=True):
        if not isinstance(given, torch.Tensor):
            raise DTypeError(
                f"{name} is a {type(given).__name__}, not a tensor.",
                action=f"Pass torch.as_tensor({name}), or call qkv.attention.",
            )
    if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
        raise DTypeError(
            f"attn_mask is a {type(attn_mask).__name__}, not a tensor.",
            action="Call qkv.attention(query, key, value, attn_mask)."
            if isinstance(attn_mask, qkv.Variant)
            else "Pass torch.as_tensor(attn_mask), or None.",
        )
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if flag is not True and flag is not False and not isinstance(flag, torch.SymBool):
            checked_flag(name, flag)
    is_array = isinstance(dropout_p, torch.Tensor | np.ndarray) and dropout_p.ndim
    if dropout_p is None or isinstance(dropout_p, str | bytes) or is_array:
        raise ArgumentError(
            "dropout_p is not a single number.", action="Pass a number from 0 to 1."
        )
    if any(t.layout is not torch.strided for t in inputs if not t.is_nested):
        raise DTypeError("a sparse tensor was given.", action="Pass its to_dense().")
    if any(t.is_nested for t in inputs):
        raise UnsupportedError(
            "a nested tensor was given.",
            action="Pack the sequences and pass qkv.Segments to qkv.attention, or pad them.",
        )
    if not enable_gqa:
        query, key, value = _with_equal_heads(*inputs)
    elif key.shape[-3:-2] != value.shape[-3:-2] and min(t.ndim for t in inputs) > 2:
        key, value = _repeated(*inputs)
    if query.ndim and key.ndim and query.shape[-1] == key.shape[-1] == 0:
        query, key = (torch.nn.functional.pad(t, (0, 1)) for t in (query, key))
        scale = 1.0
    variants: list[Any] = [qkv.Causal("start")] if is_causal else []
    lower_right = None if attn_mask is None else _lower_right(attn_mask, query, key)
    if lower_right is not None:
        if is_causal and lower_right:
            raise ArgumentError(
                "is_causal counts from the top left, the mask from the bottom right.",
                action="Pass one of them.",
            )
        variants = [qkv.Causal("end" if lower_right else "start")]
    elif attn_mask is not None:
        variants.append(_mask(attn_mask))
    if dropout_p and dropout_p != 1:
        variants.append(qkv.Dropout(dropout_p, torch.randint(2**63 - 1, (), device="cpu")))
    try:
        output: Tensor = qkv.attention(query, key, value, *variants, scale=scale)
    except ShapeError as error:
        if "layout=" not in error.action:
            # An attn_mask is a tensor.
            dense, _, lengths = error.action.partition(" or qkv.KeyLengths")
            raise error.with_action(f"{dense}." if lengths else dense) from None
        raise error.with_action(
            "Pass (..., heads, length, dim), as by transpose(-3, -2)."
        ) from None
    return torch.nn.functional.dropout(output, 1.0) if dropout_p == 1 else output


def _lower_right(attn_mask: Tensor, query: Tensor, key: Tensor) -> bool | None:
    """Whether a causal bias of torch counts from the bottom right; None for any other mask."""
    if type(attn_mask) is Tensor:
        return None
    # Imported only here, because it imports torch's compiler.
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return None
    of_mask = attn_mask.seq_len_q, attn_mask.seq_len_kv
    # As in torch, a square mask counts from the top left, whatever the lengths are.
    if attn_mask.variant != CausalVariant.LOWER_RIGHT or of_mask[0] == of_mask[1]:
        return False
    lengths = query.shape[-2], key.shape[-2]
    if of_mask != lengths:
        raise ShapeError(
            f"causal_lower_right{of_mask} is for {of_mask[0]} queries and {of_mask[1]} keys; there "
            f"are {lengths[0]} and {lengths[1]}.",
            action=f"Pass causal_lower_right{lengths}.",
        )
    return True


def _mask(attn_mask: Tensor) -> Any:
    """A floating mask stays bare, so that one of zeros and ones is warned of."""
    if attn_mask.dtype is torch.bool:
        return qkv.Mask(attn_mask)
    if not attn_mask.is_floating_point():
        raise DTypeError(
            f"attn_mask has dtype {attn_mask.dtype}, neither torch.bool nor a floating type.",
            action="Pass attn_mask.to(torch.bool) if 1 means may attend, or "
            "attn_mask.to(query.dtype) to add it to the scores.",
        )
    return attn_mask


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value with the heads of query, of which each has a divisor."""
    heads, kv_heads, v_heads = (t.shape[-3] for t in (query, key, value))
    if not (kv_heads and v_heads) or heads % kv_heads or heads % v_heads:
        raise _unfit(
            f"num_heads={heads} is not a multiple of the {kv_heads} heads of key and the "
            f"{v_heads} of value.",
            (query, key, value),
            "Let every group of query heads be of one size.",
        )
    return key.repeat_interleave(heads // kv_heads, -3), value.repeat_interleave(
        heads // v_heads, -3
    )


def _with_equal_heads(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Heads broadcast like any other dimension; they are not shared in groups."""
    query, key, value = tensors
    if max(query.ndim, key.ndim, value.ndim) < 3 or min(query.ndim, key.ndim, value.ndim) < 2:
        return tensors
    if query.shape[-3:-2] == key.shape[-3:-2] == value.shape[-3:-2]:
        return tensors
    query, key, value = (t[None] if t.ndim == 2 else t for t in tensors)
    # Torch's compiler cannot read what catches the error of `torch.broadcast_shapes`.
    counts = [t.shape[-3] for t in (query, key, value) if t.shape[-3] != 1]
    heads = counts[0] if counts else 1
    if any(count != heads for count in counts):
        raise _unfit(
            "heads of query, key and value do not broadcast with one another.",
            tensors,
            "Pass enable_gqa=True if groups of query heads share key and value.",
        )
    query = query.expand(*query.shape[:-3], heads, *query.shape[-2:])
    if key.shape[-3] != value.shape[-3]:
        key, value = (t.expand(*t.shape[:-3], heads, *t.shape[-2:]) for t in (key, value))
    return query, key, value


def _unfit(fact: str, tensors: tuple[Tensor, ...], action: str) -> ShapeError:
    names = zip(("query", "key", "value"), tensors, strict=True)
    return ShapeError(fact, [(name, f"{t.dtype} {tuple(t.shape)}") for name, t in names], action)
