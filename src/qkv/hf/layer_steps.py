"""Decoding steps inside a model: what one layer has prepared, other layers and steps take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from qkv.bridges.torch_prepared import array_bytes, leaf_values, read_in_place
from qkv.bridges.torch_steps import LayerStep, layer_step
from qkv.call.bound import BoundCall, Structure, bind
from qkv.call.flatten import Leaves, flatten
from qkv.call.options import OptionValues
from qkv.variants import Causal, MaskVariant, SlidingWindow

if TYPE_CHECKING:
    from qkv.hf.layer_call import LayerCall

__all__ = ["LayerOptions", "LayerSteps", "are_of_distances", "steps_of"]


@dataclass(frozen=True, slots=True)
class _Known:
    """A step, and the arrays of its mask, which all layers share."""

    step: LayerStep
    mask_arrays: tuple[Tensor, ...]


class LayerOptions(NamedTuple):
    """What a layer says beside its mask and its operands, with its sinks as bytes."""

    scaling: float | None
    softcap: float | None
    has_bias: bool
    sinks: bytes | None

    @classmethod
    def of(
        cls,
        scaling: float | None,
        softcap: float | None,
        position_bias: Tensor | None,
        sinks: Tensor | None,
    ) -> LayerOptions | None:
        """None if the sinks cannot be compared by value."""
        values = None
        if sinks is not None:
            values = array_bytes(sinks)
            if values is None:
                return None
        return cls(scaling, softcap, position_bias is not None, values)


class LayerSteps:
    """The decoding steps of layers with equal masks, by what else layers say."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[LayerOptions, _Known] = {}

    def run(
        self,
        says: LayerOptions,
        q_offset: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position_bias: Tensor | None,
    ) -> Tensor | None:
        """Output (batch, 1, num_heads, v_head_dim) of a layer like an earlier one, else None."""
        known = self._known.get(says)
        if known is None:
            return None
        if position_bias is None:
            out = known.step(q_offset, query, key, value, *known.mask_arrays)
        else:
            out = known.step(q_offset, query, key, value, position_bias, *known.mask_arrays)
        if out is None:
            self._known.pop(says, None)
        return out

    def add(self, says: LayerOptions, call: LayerCall) -> Tensor | None:
        """Output of the first such layer, None if nothing was prepared for its call."""
        options = OptionValues(call.scale, "bhld", call.q_offset, call.kv_offset)
        bound = bind(call.query, call.key, call.value, call.variants, options)
        step = layer_step(bound)
        if step is None:
            return None
        read = tuple(read_in_place(bound))
        out = step(call.q_offset, *read)
        if out is not None:
            if len(self._known) >= _MOST_LAYERS:
                self._known.clear()
            self._known[says] = _Known(step, read[4:] if says.has_bias else read[3:])
        return out


_MOST = 16
"""Kinds of masks that are kept. A model has one for each kind of layer."""
_MOST_LAYERS = 256
"""Layers of one mask that are kept. They differ where they have sinks, which are parameters."""
_latest: dict[Any, LayerSteps] = {}


def steps_of(variants: tuple[MaskVariant, ...], kv_offset: int) -> LayerSteps:
    """The steps of these masks: those of an equal mask before, unless it holds large arrays."""
    masks = variants if are_of_distances(variants) else _compared(variants)
    if masks is None:
        return LayerSteps()
    known = _latest.get((masks, kv_offset))
    if known is None:
        if len(_latest) >= _MOST:
            _latest.clear()
        known = _latest.setdefault((masks, kv_offset), LayerSteps())
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
    values = leaf_values(BoundCall(Structure((), trees, (), tuple(leaves.by_value)), leaves.arrays))
    return None if values is None else (trees, values)
