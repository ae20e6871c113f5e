"""Decoding steps of tensors: prepared for any number of keys, and repeated by further layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv.backends import RepeatedStep, RepeatingSteps, generation
from qkv.bridges.torch_guards import Guard, form_guard
from qkv.bridges.torch_openmp import on_torch_threads
from qkv.bridges.torch_prepared import (
    are_plain,
    empty_maker,
    leaf_values,
    looks_on,
    read_in_place,
    remember,
    remember_call,
)
from qkv.call.bound import BoundCall, Structure
from qkv.call.cache import CALLS, Key
from qkv.call.decoding import MAX_DECODE_QUERIES, AnyLengthCall, decoding_step
from qkv.call.flatten import without_arrays
from qkv.call.keys import heads_first

__all__ = ["LayerStep", "layer_step", "prepare_step", "run_step"]


@dataclass(slots=True)
class _PreparedStep:
    """A prepared decoding step of tensors.

    `fits` asks of tensors whether they are like those that were prepared for, but for their sizes.
    `repeats` counts steps over `kv_len` keys, one after the other.
    """

    fits: Guard
    values: tuple[bytes, ...]
    generation: int
    structure: Structure
    steps: RepeatingSteps
    step: RepeatedStep
    at_end: bool
    q_len: int
    empty_out: Callable[[], Tensor]
    empty_lse: Callable[[], Tensor]
    kv_len: int = 0
    repeats: int = 0

    def compute(
        self, bound: BoundCall, read: Sequence[Any], rows: bool, q_offset: int | None = None
    ) -> Any:
        """See `qkv.bridges.torch_prepared.PreparedTensors`."""
        q_len, kv_len = self.q_len, read[1].shape[-2]
        if q_len == kv_len:  # Then the positions may be left out, which is another call.
            return None
        has_position = q_offset is not None
        if q_offset is None:
            q_offset = kv_len - q_len if self.at_end else 0
        out = self.empty_out()
        lse = self.empty_lse() if rows else None
        at_out, at_lse = out.data_ptr(), 0 if lse is None else lse.data_ptr()
        arguments = kv_len, at_out, at_lse, q_offset, _layouts(read), (read, out, lse)
        if kv_len <= self.step.brief_keys:
            done = self.step(*arguments)
        else:
            with on_torch_threads():
                done = self.step(*arguments)
        if not done:
            return None
        if not has_position:
            self._count(read, kv_len, q_offset)
        return out if lse is None else (out, lse)

    def _count(self, read: Sequence[Any], kv_len: int, q_shift: int) -> None:
        """Prepare for this very length when it has often come again, as in caches of fixed size.

        Only for steps that were made: others may have sizes that this one is not prepared for.
        """
        if kv_len != self.kv_len:
            self.kv_len, self.repeats = kv_len, 0
        self.repeats += 1
        if self.repeats != _MANY_REPEATS or len(read) > 3:
            return
        strides = [[t.itemsize * stride for stride in t.stride()] for t in read]
        call = self.steps.of_length(kv_len, q_shift, strides)
        if call is not None:
            remember_call(self.structure, self.values, read, call, self.empty_out, self.empty_lse)


_MANY_REPEATS = 64
"""Preparing for one length takes about as long as so many steps save by it."""


def _layouts(read: Sequence[Any]) -> tuple[Any, ...]:
    """Address, sizes, and strides in elements of each tensor."""
    query, key, value, *arrays = read
    operands: tuple[Any, ...] = (
        query.data_ptr(), query.shape, query.stride(), key.data_ptr(), key.shape, key.stride(),
        value.data_ptr(), value.shape, value.stride(),
    )  # fmt: skip
    for array in arrays:
        operands = (*operands, array.data_ptr(), array.shape, array.stride())
    return operands


def run_step(bound: BoundCall, rows: bool) -> Any:
    """Output, with lse if `rows`, of a step; None if it was not prepared for, or torch looks on."""
    found = None if looks_on() else _key(bound)
    known: _PreparedStep | None = None if found is None else CALLS.get(found[0])
    if known is None or found is None:
        return None
    q_offset = found[1]
    if q_offset is None:  # A number is part of the structure, and another one in each step.
        remember(bound.structure, known)
    return known.compute(bound, read_in_place(bound), rows, q_offset)


class LayerStep:
    """A decoding step that the layers of a model take one after the other, and the next step too.

    The first layer has found what its variants and options come to. The others ask only whether
    their tensors are like those of the first.
    """

    __slots__ = ("_empty_out", "_fits", "_generation", "_step")

    def __init__(self, bound: BoundCall, known: _PreparedStep, step: RepeatedStep) -> None:
        query, _, value, *_ = bound.leaves
        batch, heads, q_len, _ = query.shape
        self._fits = known.fits
        self._generation = known.generation
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
        if looks_on() or self._generation != generation() or not self._fits(*read):
            return None
        out, kv_len = self._empty_out(), read[1].shape[-2]
        operands = _layouts(read)
        done = self._step(kv_len, out.data_ptr(), 0, q_offset, operands, (read, out))
        return out if done else None


def layer_step(bound: BoundCall) -> LayerStep | None:
    """A step of one query row in four dimensions, for further layers; None if none is prepared."""
    if len(bound.leaves[0].shape) != 4 or bound.leaves[0].shape[2] != 1:
        return None
    found = None if looks_on() else _key(bound)
    known: _PreparedStep | None = None if found is None else CALLS.get(found[0])
    if known is None:
        return None
    step = known.steps.repeated_addresses(between_products=True)
    return None if step is None else LayerStep(bound, known, step)


def _key(bound: BoundCall) -> tuple[Key, int | None] | None:
    """The key of a decoding step of plain tensors, and the place of its queries if it was said."""
    structure = bound.structure
    scale, layout, q_offset, kv_offset, backend = structure.options
    read = read_in_place(bound)
    query, key, value = read[:3]
    if layout != "bhld" or not structure.is_plain or not are_plain(*read):
        return None
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    if (
        len(q_shape) < 3
        or not len(q_shape) == len(k_shape) == len(v_shape)
        or not 0 < q_shape[-2] <= MAX_DECODE_QUERIES
        or not q_shape[-2] != k_shape[-2] > 0
        or k_shape[:-1] != v_shape[:-1]
    ):
        return None
    values = leaf_values(bound)
    if values is None:
        return None
    given = None
    if type(q_offset) is int:
        given, q_offset = q_offset, int
    key_of_step = (
        "tensor step", generation(), structure.variants, values, scale, q_offset, kv_offset,
        backend, query.dtype, q_shape, key.dtype, k_shape[:-2], k_shape[-1], value.dtype,
        v_shape[-1],
        *[(a.dtype, *[None if n == k_shape[-2] else n for n in a.shape]) for a in read[3:]],
    )  # fmt: skip
    return key_of_step, given


def prepare_step(bound: BoundCall, seen: BoundCall, out: Tensor) -> bool:
    """Whether the call is a decoding step that was prepared for; it is kept for tensors too.

    Parameters
    ----------
    bound, seen : BoundCall
        The call as it was bound, and of NumPy views of the same memory.
    out : Tensor
        What it gave.
    """
    views = heads_first(seen)
    step = None if views is None else decoding_step(seen, views)
    call: AnyLengthCall | None = None if step is None else CALLS.get(step.key)
    if call is None:
        return False
    steps = call.steps
    if step is None or not isinstance(steps, RepeatingSteps):
        return False
    has_own = call.lengths or bound.structure.per_step or not step.any_length
    found = None if has_own or looks_on() else _key(bound)
    repeated = None if found is None else steps.repeated_addresses()
    values = leaf_values(bound)
    if found is not None and repeated is not None and values is not None:
        wide = torch.float64 if out.dtype is torch.float64 else torch.float32
        makers = empty_maker(out.shape, out.dtype), empty_maker(out.shape[:-1], wide)
        fits = form_guard(*read_in_place(bound))
        known = _PreparedStep(
            fits, values, generation(), without_arrays(bound.structure), steps, repeated,
            call.at_end, out.shape[-2], *makers,
        )  # fmt: skip
        CALLS.insert(without_arrays(found[0]), known)
    return True
