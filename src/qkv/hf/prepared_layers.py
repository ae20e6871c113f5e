"""Decoding steps inside a model: prepared calls, one for each kind of layer.

The first layer of a kind finds what its variants and options come to. Further layers, and the next
tokens, ask only whether their tensors are like its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor

from qkv.bridges.torch.repeated.layouts import ArrayValue, array_value, leaf_values
from qkv.bridges.torch.repeated.prepared import step_of
from qkv.bridges.torch.repeated.runs import Step
from qkv.call.binding.bound import BoundCall, Structure, bind
from qkv.call.binding.flatten import Leaves, flatten
from qkv.call.binding.options import DEFAULTS, OptionValues
from qkv.variants import Causal, MaskVariant, SlidingWindow

if TYPE_CHECKING:
    from qkv.hf.layer_call import LayerCall

__all__ = [
    "LayerKind", "PreparedLayers", "are_of_distances", "layers_of", "prepare_layer", "run_layer",
]  # fmt: skip


class LayerKind(NamedTuple):
    """What a layer says beside its mask and its operands, with its sinks by value."""

    scaling: float | None
    softcap: float | None
    has_bias: bool
    sinks: ArrayValue | None

    @classmethod
    def of(
        cls,
        scaling: float | None,
        softcap: float | None,
        position_bias: Tensor | None,
        sinks: Tensor | None,
    ) -> LayerKind | None:
        """None if the sinks cannot be compared by value."""
        values = None if sinks is None else array_value(sinks)
        if sinks is not None and values is None:
            return None
        return cls(scaling, softcap, position_bias is not None, values)


class PreparedLayer(NamedTuple):
    """The prepared call of one kind of layer, and the arrays of its mask."""

    step: Step
    mask_arrays: tuple[Tensor, ...]


PreparedLayers: TypeAlias = dict[LayerKind, PreparedLayer]
"""The prepared calls of layers with equal masks."""


def run_layer(
    layers: PreparedLayers,
    kind: LayerKind,
    q_offset: int,
    operands: tuple[Tensor, Tensor, Tensor],
    position_bias: Tensor | None,
) -> Tensor | None:
    """Output (batch, 1, num_heads, v_head_dim) of a layer like an earlier one, else None."""
    known = layers.get(kind)
    if known is None:
        return None
    biases = () if position_bias is None else (position_bias,)
    out = known.step.between_products((*operands, *biases, *known.mask_arrays), q_offset)
    if out is None:
        layers.pop(kind, None)
    return out


def prepare_layer(layers: PreparedLayers, kind: LayerKind, call: LayerCall) -> Tensor | None:
    """Output of the first layer of its kind, None if nothing was prepared for its call."""
    options = OptionValues(call.scale, "bhld", call.q_offset, call.kv_offset)
    bound = bind(call.query, call.key, call.value, call.variants, options)
    read = tuple(bound.read_in_place)
    step = step_of(bound) if read[0].ndim == 4 else None
    if step is None:
        return None
    out = step.between_products(read, call.q_offset)
    if out is None:
        return None
    if len(layers) >= _MOST_LAYERS:
        layers.clear()
    layers[kind] = PreparedLayer(step, read[4:] if kind.has_bias else read[3:])
    return out


_MOST = 16
"""Kinds of masks that are kept. A model has one for each kind of layer."""
_MOST_LAYERS = 256
"""Layers of one mask that are kept. They differ where they have sinks, which are parameters."""
_latest: dict[Any, PreparedLayers] = {}


def layers_of(variants: tuple[MaskVariant, ...], kv_offset: int) -> PreparedLayers:
    """The layers of these masks: those of an equal mask before, unless it holds large arrays."""
    masks = variants if are_of_distances(variants) else _compared(variants)
    if masks is None:
        return {}
    known = _latest.get((masks, kv_offset))
    if known is None:
        if len(_latest) >= _MOST:
            _latest.clear()
        known = _latest.setdefault((masks, kv_offset), {})
    return known


def are_of_distances(variants: tuple[MaskVariant, ...]) -> bool:
    """Whether masks read nothing but the distance of two positions, and hold no arrays."""
    return all(type(mask) is Causal or type(mask) is SlidingWindow for mask in variants)


def _compared(variants: tuple[MaskVariant, ...]) -> tuple[Any, ...] | None:
    """What masks are compared by; None if they hold large arrays."""
    leaves = Leaves.none()
    trees = tuple([flatten(variant, leaves, "in_place") for variant in variants])
    if len(leaves.by_value) != len(leaves.arrays) or leaves.lengths:
        return None
    values = leaf_values(
        BoundCall(Structure((), trees, DEFAULTS, tuple(leaves.by_value)), leaves.arrays)
    )
    return None if values is None else (trees, values)
