"""Decoding steps of tensors: prepared for any number of keys, and repeated by further layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkv.backends import AddressedSteps, RepeatedStep, RepeatingSteps, generation
from qkv.bridges.torch_guards import Guard, form_guard
from qkv.bridges.torch_prepared import (
    are_plain,
    empty_maker,
    leaf_values,
    looks_on,
    read_in_place,
    remember_step,
)
from qkv.call.bound import BoundCall
from qkv.call.cache import CALLS, Key
from qkv.call.decoding import MAX_DECODE_QUERIES, AnyLengthCall, decoding_step
from qkv.call.flatten import without_arrays
from qkv.call.keys import heads_first

__all__ = ["LayerStep", "layer_step", "prepare_step", "run_step"]


class _PreparedStep(NamedTuple):
    """A prepared decoding step, and what its results are written to.

    `repeating` are the steps, if they can be repeated over as many keys. `fits` asks of tensors
    whether they are like those that were prepared for, but for their sizes.
    """

    call: AnyLengthCall
    steps: AddressedSteps
    repeating: RepeatingSteps | None
    fits: Guard
    empty_out: Callable[[], Tensor]
    empty_lse: Callable[[], Tensor]


def run_step(bound: BoundCall, rows: bool) -> Any:
    """Output, with lse if `rows`, of a step; None if it was not prepared for, or torch looks on."""
    found = None if looks_on() else _find(bound)
    if found is None:
        return None
    known, q_shift = found
    query, key, value, *arrays = read_in_place(bound)
    at_query, at_key, at_value = query.data_ptr(), key.data_ptr(), value.data_ptr()
    if not (at_query and at_key and at_value):  # Their memory has been freed.
        return None
    out = known.empty_out()
    lse = known.empty_lse() if rows else None
    at_lse = 0 if lse is None else lse.data_ptr()
    addresses = at_query, at_key, at_value, out.data_ptr(), at_lse, 0, ()
    strides = _byte_strides(query), _byte_strides(key), _byte_strides(value)
    where = [(a.data_ptr(), a.shape, _byte_strides(a)) for a in arrays]
    kv_len = key.shape[-2]
    done = known.steps.run(addresses, kv_len, q_shift, strides, (bound, out, lse), where)
    if not done:
        return None
    steps = known.repeating
    # Positions that are numbers are part of the structure, and new in each step.
    if steps is not None and type(bound.structure.options[2]) is not int:
        form = q_shift, query.shape, key.shape, value.shape, strides
        prepared = partial(steps.of_length, kv_len, q_shift, strides)
        remember_step(bound, form, prepared, (known.empty_out, known.empty_lse))
    return out if lse is None else (out, lse)


class LayerStep:
    """A decoding step that the layers of a model take one after the other, and the next step too.

    The first layer has found what its variants and options come to. The others ask only whether
    their tensors are like those of the first. It is for one caller at a time.
    """

    __slots__ = ("_empty_out", "_fits", "_generation", "_step")

    def __init__(self, bound: BoundCall, known: _PreparedStep, step: RepeatedStep) -> None:
        query, _, value, *_ = bound.leaves
        batch, heads, q_len, _ = query.shape
        self._fits = known.fits
        self._generation = generation()
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
        query, key, value, *arrays = read
        kv_shape = key.shape
        numbers = (
            query.data_ptr(), *query.shape, *query.stride(),
            key.data_ptr(), *kv_shape, *key.stride(),
            value.data_ptr(), *value.shape, *value.stride(),
        )  # fmt: skip
        for array in arrays:
            numbers = (*numbers, array.data_ptr(), *array.shape, *array.stride())
        out = self._empty_out()
        done = self._step(kv_shape[2], out.data_ptr(), 0, q_offset, numbers, (read, out))
        return out if done else None


def layer_step(bound: BoundCall) -> LayerStep | None:
    """A step of one query row in four dimensions, for further layers; None if none is prepared."""
    if len(bound.leaves[0].shape) != 4 or bound.leaves[0].shape[2] != 1:
        return None
    found = None if looks_on() else _find(bound)
    step = None if found is None else found[0].steps.repeated()
    return None if found is None or step is None else LayerStep(bound, found[0], step)


def _find(bound: BoundCall) -> tuple[_PreparedStep, int] | None:
    """What was prepared for a step, and where its query row 0 stands."""
    found = _key(bound)
    if found is None:
        return None
    known: _PreparedStep | None = CALLS.get(found[0])
    if known is None:
        return None
    query, key = bound.leaves[:2]
    return known, known.call.q_shift(found[1], query.shape[-2], key.shape[-2])


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


def _byte_strides(tensor: Tensor) -> list[int]:
    item = tensor.itemsize
    return [item * stride for stride in tensor.stride()]


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
    if step is None or call is None or not isinstance(call.steps, AddressedSteps):
        return False
    has_own = call.lengths or bound.structure.per_step or not step.any_length
    found = None if has_own or looks_on() else _key(bound)
    if found is not None:
        wide = torch.float64 if out.dtype is torch.float64 else torch.float32
        makers = empty_maker(out.shape, out.dtype), empty_maker(out.shape[:-1], wide)
        fits = form_guard(*read_in_place(bound))
        repeating = call.steps if isinstance(call.steps, RepeatingSteps) else None
        known = _PreparedStep(call, call.steps, repeating, fits, *makers)
        CALLS.insert(without_arrays(found[0]), known)
    return True
