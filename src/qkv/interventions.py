"""What a head writes if its weights were others: none, equal ones, or those of another prompt.

Attention weights alone do not explain the output of a model (Jain and Wallace, 2019). To see what a
head does, its output is replaced and the model runs on. Sources: Vig et al., "Investigating Gender
Bias in Language Models Using Causal Mediation Analysis" (2020); Olsson et al., "In-context Learning
and Induction Heads" (2022), whose ablations these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from qkv._api import attention
from qkv.arguments.declarations import checked, shown
from qkv.arrays import is_array, namespace
from qkv.errors import ArgumentError, ShapeError
from qkv.variants import Bias, MaskVariant

__all__ = ["HeadChange", "HeadInputs", "changed_heads"]


@dataclass(frozen=True, slots=True, eq=False)
class HeadInputs:
    """Query and key of all heads of a layer, with the variants and options of their call.

    Attributes
    ----------
    query, key : array (..., heads, length, head_dim)
    variants : tuple
        As `qkv.attention` takes them.
    options : mapping
        scale, q_offset, kv_offset.
    """

    query: Any
    key: Any
    variants: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


HeadChange: TypeAlias = Literal["off", "uniform"] | HeadInputs
"""What becomes of a head: its output 0; equal weights over the keys that its masks allow, without
biases and sinks; or the weights of another prompt."""


@checked
def changed_heads(
    output: Any, inputs: HeadInputs, value: Any, changes: Mapping[int, HeadChange]
) -> Any:
    """The output of a layer with some heads changed.

        off      out[h] = 0
        uniform  out[h, i] = mean of v[j] over the keys j that the masks allow i
        copy     out[h] = softmax(scores of the other prompt) v

    Parameters
    ----------
    output : array (..., num_heads, q_len, v_head_dim)
        As the layer computed it.
    inputs : HeadInputs
        What it was computed from.
    value : array (..., num_kv_heads, kv_len, v_head_dim)
    changes : mapping of int to HeadChange
        By query head; a `HeadInputs` is where weights are copied from.

    Returns
    -------
    array
        A new one, of the same library; differentiable where that is.

    Raises
    ------
    ArgumentError
        There is no such head, or no such change.
    ShapeError
        The other prompt has another length, number of heads or batch.

    Notes
    -----
    Cost: one more run of attention for "uniform", and for each other prompt.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.eye(2)[None]
    >>> inputs = HeadInputs(x, x, (qkv.Causal(),))
    >>> changed_heads(x, inputs, x, {0: "uniform"})
    array([[[1. , 0. ],
            [0.5, 0.5]]])
    """
    if not changes:
        return output
    num_heads = output.shape[-3]
    for head in changes:
        if not 0 <= head < num_heads:
            raise ArgumentError(
                f"head {head} does not exist.", action=f"Choose from 0 to {num_heads - 1}."
            )
    library = namespace(output, "output")
    others: dict[int, Any] = {}
    heads = []
    for head in range(num_heads):
        if head not in changes:
            heads.append(output[..., head, :, :])
            continue
        change = changes[head]
        if isinstance(change, str) and change == "off":
            heads.append(library.zeros_like(output[..., head, :, :]))
        else:
            if id(change) not in others:
                others[id(change)] = _other_output(change, inputs, value, output)
            heads.append(others[id(change)][..., head, :, :])
    return library.stack(heads, -3)


def _other_output(change: HeadChange, inputs: HeadInputs, value: Any, output: Any) -> Any:
    """The output of all heads with other weights."""
    if isinstance(change, HeadInputs):
        _require_same_sizes(change, inputs)
        other = attention(change.query, change.key, value, *change.variants, **change.options)
        if other.shape[:-3] != output.shape[:-3]:
            raise ShapeError(
                f"with the other prompt the batch is {tuple(other.shape[:-3])}, "
                f"else {tuple(output.shape[:-3])}.",
                action="Copy weights from one prompt, or from as many as are run.",
            )
        return other
    if not isinstance(change, str) or change != "uniform":
        raise ArgumentError(
            f"{shown(change)} is not a change of a head.",
            action='Use "off", "uniform", or the inputs of another prompt.',
        )
    # Scores that are all 0 have equal weights. Biases and sinks would change them.
    zeros_like = namespace(inputs.query, "query").zeros_like
    query, key = zeros_like(inputs.query), zeros_like(inputs.key)
    masks = [mask for variant in inputs.variants for mask in _masks(variant)]
    return attention(query, key, value, *masks, **{**inputs.options, "scale": 1.0})


def _masks(variant: Any) -> list[Any]:
    """What a variant forbids, as a mask."""
    if isinstance(variant, MaskVariant):
        return [variant]
    if isinstance(variant, Bias):
        variant = variant.array if is_array(variant.array) else np.asarray(variant.array)
    if not is_array(variant):
        return []
    if "bool" in str(variant.dtype):
        return [variant]
    # Libraries forbid a pair with the most negative number of a type, or with -inf.
    return [variant > -1e4] if "float16" in str(variant.dtype) else [variant > -1e30]


def _require_same_sizes(other: HeadInputs, inputs: HeadInputs) -> None:
    (heads, *lengths), (wanted_heads, *wanted_lengths) = (
        (x.query.shape[-3], x.query.shape[-2], x.key.shape[-2]) for x in (other, inputs)
    )
    if heads != wanted_heads:
        raise ShapeError(
            f"the other prompt has num_heads={heads}, this one {wanted_heads}.",
            action="Copy weights between prompts of one layer.",
        )
    if lengths != wanted_lengths:
        raise ShapeError(
            f"the other prompt has {lengths[0]} queries and {lengths[1]} keys, this one "
            f"{wanted_lengths[0]} and {wanted_lengths[1]}.",
            action="Copy weights between prompts of one length.",
        )
