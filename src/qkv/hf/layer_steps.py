"""Decoding steps inside a model: what one layer has prepared, other layers and steps take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from qkv.backends import PreparedSteps, conditions
from qkv.backends.conditions import Conditions
from qkv.bridges.torch_guards import form_guard
from qkv.bridges.torch_layouts import (
    are_dense,
    array_bytes,
    empty_maker,
    gradients_wanted,
    leaf_values,
    read_in_place,
)
from qkv.bridges.torch_observers import looks_on
from qkv.bridges.torch_prepared import known_call
from qkv.bridges.torch_runs import layouts_of, steps_of_tensors
from qkv.call.bound import BoundCall, Structure, bind
from qkv.call.cache import CALLS
from qkv.call.flatten import Leaves, flatten
from qkv.call.options import OptionValues
from qkv.variants import Causal, MaskVariant, SlidingWindow

if TYPE_CHECKING:
    from qkv.hf.layer_call import LayerCall

__all__ = ["LayerOptions", "LayerSteps", "are_of_distances", "steps_of"]


class _LayerStep:
    """A decoding step of one query row that layers take one after the other, and the next step too.

    The first layer has found what its variants and options come to. The others ask only whether
    their tensors are like those of the first.
    """

    __slots__ = ("_conditions", "_empty_out", "_fits", "_step")

    def __init__(self, read: Sequence[Tensor], step: PreparedSteps, held: Conditions) -> None:
        query, _, value, *_ = read
        batch, heads, q_len, _ = query.shape
        self._fits = form_guard(*read)
        self._conditions = held
        self._step = step
        self._empty_out = empty_maker((batch, q_len, heads, value.shape[-1]), query.dtype)

    def __call__(self, q_offset: int, *read: Tensor) -> Tensor | None:
        """Output (batch, q_len, num_heads, v_head_dim); None if something is not as it was.

        Parameters
        ----------
        q_offset : int
            Position of the query.
        read : tensors
            Query, key, value, and the arrays of variants that are read in place.
        """
        if looks_on() or self._conditions != conditions() or not self._fits(*read):
            return None
        out, kv_len = self._empty_out(), read[1].shape[-2]
        operands = layouts_of(read)
        done = self._step.run(kv_len, out.data_ptr(), 0, q_offset, operands, (read, out), True)
        return out if done else None


def _layer_step(bound: BoundCall) -> _LayerStep | None:
    """A step of one query row in four dimensions, for further layers; None if none is prepared."""
    read = read_in_place(bound)
    entry = None if looks_on() else CALLS.entry(bound.structure)
    if entry is None or len(read[0].shape) != 4 or read[0].shape[2] != 1:
        return None
    if not are_dense(*read) or gradients_wanted(read):
        return None
    known = known_call(entry, bound, "forward")
    step = None if known is None else steps_of_tensors(known, bound)
    return None if known is None or step is None else _LayerStep(read, step, known.conditions)


@dataclass(frozen=True, slots=True)
class _Known:
    """A step, and the arrays of its mask, which all layers share."""

    step: _LayerStep
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
        step = _layer_step(bound)
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
