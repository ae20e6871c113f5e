"""Calls like an earlier one: what was checked for them once need not be checked again.

A call is *like* another if its arrays have the same types, shapes and strides and everything else
that was said is equal. What variants hold must be constants or few numbers, but for the arrays of
`Mask` and `Bias`, which are read where they lie and of which any values will do. Calls of few
queries with variants that only know positions are like one another whatever the number of keys: a
step of decoding is like the step before.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from dataclasses import fields, is_dataclass
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qkv._call import Call
from qkv.backends import Growing, Prepared, generation
from qkv.problem.builder import INDEX_LIMIT
from qkv.variants.alibi import ALiBi
from qkv.variants.bias import Bias
from qkv.variants.causal import Causal
from qkv.variants.dense_mask import Mask
from qkv.variants.global_tokens import GlobalTokens
from qkv.variants.key_lengths import KeyLengths
from qkv.variants.prefix import Prefix
from qkv.variants.segments import Segments
from qkv.variants.sliding_window import SlidingWindow
from qkv.variants.softcap import Softcap

__all__ = [
    "Said", "apart", "are_constants", "attend", "forms_of", "insert", "is_known", "likeness",
    "prepared", "turned",
]  # fmt: skip

Array = NDArray[Any]
Said: TypeAlias = tuple[tuple[Any, ...], Any, Any, Any, Any, Any]
"""Variants, scale, layout, q_offset, kv_offset and backend."""

KEPT = 256
"""Calls that are remembered, about 4 KB each; the oldest go first."""

_READ_IN_PLACE = (Mask, Bias)
_BY_VALUE = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (KeyLengths, Segments, Prefix, GlobalTokens, ALiBi)
}
"""Variants that are alike if what they hold is, and its names."""
_MOST_BYTES = 4096
"""Of an array that is compared by value."""
_FEW = 16
"""Queries of a step."""
_OF_POSITIONS = (Causal, SlidingWindow, Softcap, ALiBi)
"""Variants that are the same for any number of keys."""
_Form: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...]]

_prepared: dict[Hashable, Prepared] = {}
_growing: dict[Hashable, Growing] = {}
_seen: dict[Hashable, None] = {}
_lock = Lock()


def _new_lock() -> None:
    global _lock
    _lock = Lock()


if hasattr(os, "register_at_fork"):
    # Another thread of the parent may have held the old one.
    os.register_at_fork(after_in_child=_new_lock)


def attend(
    query: Any,
    key: Any,
    value: Any,
    variants: tuple[Any, ...],
    scale: Any,
    layout: Any,
    q_offset: Any,
    kv_offset: Any,
    backend: Any,
    rows: bool = True,
    backward: bool = False,
) -> tuple[Any, Any, Array | None]:
    """Output, lse, and what rounding took from lse as `Partial` knows it.

    The last two are anything unless `rows`. `backward` says that a backward pass will follow.
    """
    said = variants, scale, layout, q_offset, kv_offset, backend
    # Both layouts are prepared for as one.
    blhd = layout == "blhd" and all(type(a) is np.ndarray for a in (query, key, value))
    q, k, v = [turned(a) for a in (query, key, value)] if blhd else (query, key, value)
    like, arrays = likeness(q, k, v, said, backward)
    ready = None if like is None else _recall(like)
    if ready is not None:
        known = ready(q, k, v, rows, arrays)
        if known is not None:
            return _as_asked(known, blhd)
        _prepared.pop(like, None)
    step = None if arrays or like is None else _step(q, k, v, said, backward)
    grow = None if step is None else _growing.get(step.likeness)
    if step is not None and grow is not None:
        known = grow(q, k, v, rows, step.q_shift)
        if known is not None:
            return _as_asked(known, blhd)
        _growing.pop(step.likeness, None)
    call = Call.bind(
        query,
        key,
        value,
        variants,
        scale=scale,
        layout=layout,
        q_offset=q_offset,
        kv_offset=kv_offset,
        backend=backend,
    )
    if like is not None and not (step and _remember_step(step.likeness, variants, call)):
        _remember(like, variants, arrays, call, backward)
    partial = call.run_for_backward() if backward else call.run()
    return call.output(partial), call.rows(partial.lse), partial.lse_rest


def prepared(query: Array, key: Array, value: Array, said: Said) -> Prepared | None:
    """What is known of calls like `attend(query, key, value, *said)`, with heads before rows."""
    like, _ = likeness(query, key, value, said)
    return None if like is None else _recall(like)


def apart(variants: tuple[Any, ...], kind: type) -> _Form:
    """Variants with only its type in the place of each that reads an array of `kind` where it lies,
    and these arrays."""
    if not variants:
        return (), ()
    forms, arrays = [], []
    for variant in variants:
        form = type(variant)
        array = variant if form is kind else None
        if form in _READ_IN_PLACE:
            array = variant.array
        if type(array) is kind:
            forms.append(form)
            arrays.append(array)
        else:
            forms.append(variant)
    return tuple(forms), tuple(arrays)


def forms_of(variants: tuple[Any, ...]) -> _Form:
    """As `apart` of NumPy arrays, and with few numbers in the place of variants that hold them."""
    forms, arrays = apart(variants, np.ndarray)
    if not forms:
        return (), ()
    return tuple([(type(f), *_values(f)) if type(f) in _BY_VALUE else f for f in forms]), arrays


def _values(variant: Any) -> Iterator[Any]:
    for name in _BY_VALUE[type(variant)]:
        value = getattr(variant, name)
        if type(value) is np.ndarray and value.nbytes <= _MOST_BYTES:
            yield value.dtype, value.shape, value.tobytes()
        else:
            yield type(value), value


def are_constants(said: Said) -> bool:
    """Whether nothing but variants could be an array, or equal to a constant of another type."""
    _, scale, layout, q_offset, kv_offset, _ = said
    return (
        (scale is None or type(scale) is float)
        and (q_offset is None or type(q_offset) in (int, str))
        and type(kv_offset) is int
        and (layout == "bhld" or layout == "blhd")
    )


def _as_asked(known: tuple[Any, Any, Any], blhd: bool) -> tuple[Any, Any, Any]:
    out, lse, rest = known
    return (np.ascontiguousarray(turned(out)), lse, rest) if blhd else known


def turned(array: Array) -> Array:
    """Heads and rows in each other's places."""
    return array.swapaxes(-3, -2) if array.ndim > 2 else array


def likeness(
    query: Any, key: Any, value: Any, said: Said, backward: bool = False
) -> tuple[Hashable | None, tuple[Array, ...]]:
    """What calls that are like one another have in common, None if nothing can be remembered; and
    the arrays of variants, which they have not."""
    if not (type(query) is type(key) is type(value) is np.ndarray and are_constants(said)):
        return None, ()
    if said[2] == "blhd" and min(query.ndim, key.ndim, value.ndim) < 3:
        return None, ()
    forms, arrays = forms_of(said[0])
    like = (
        query.dtype, query.shape, query.strides,
        key.dtype, key.shape, key.strides,
        value.dtype, value.shape, value.strides,
        forms, said[1], said[3:], backward, generation(),
        *[(array.dtype, array.shape, array.strides) for array in arrays],
    )  # fmt: skip
    return like, arrays


class _Step(NamedTuple):
    """What steps have in common, and where the queries of this one stand."""

    likeness: Hashable
    q_shift: int


def _step(query: Array, key: Array, value: Array, said: Said, backward: bool) -> _Step | None:
    """A call as a step of decoding, if it can be one."""
    variants, scale, _, q_offset, kv_offset, backend = said
    *batch, _, q_len, _ = query.shape if query.ndim > 2 else (0, 0, 0)
    kv_len = key.shape[-2] if key.ndim == query.ndim else 0
    if (
        not 0 < q_len <= _FEW
        or not q_len != kv_len > 0  # as many keys as queries: nobody has to say where these stand
        or value.shape[:-1] != key.shape[:-1]
        or list(key.shape[:-3]) != batch
        or not all(type(variant) in _OF_POSITIONS for variant in variants)
    ):
        return None
    ends = [variant.align for variant in variants if getattr(variant, "align", None) is not None]
    if type(q_offset) is int:
        shift, placed = q_offset, "number"
        if ends or abs(shift) > INDEX_LIMIT:
            return None
    else:
        placed = q_offset
        shift = kv_len - q_len if "end" in (q_offset, *ends) else 0
    likeness = (
        query.dtype, query.shape, key.dtype, key.shape[:-2], key.shape[-1], value.dtype,
        value.shape[-1], forms_of(variants)[0], scale, placed, kv_offset, backend, backward,
        generation(),
    )  # fmt: skip
    try:
        hash(likeness)
    except TypeError:  # a variant holds an array
        return None
    return _Step(likeness, shift)


def _remember_step(likeness: Hashable, variants: tuple[Any, ...], call: Call) -> bool:
    """Prepare for more steps like this one, once there has been another; whether that can be."""
    prepare = getattr(call.choice.backend, "prepare_growing", None)
    if prepare is None or not all(map(is_known, forms_of(variants)[0])):
        return False
    if likeness not in _seen:
        insert(_seen, likeness, None)
        return True
    ready = prepare(call.problem)
    if ready is not None:
        insert(_growing, likeness, ready)
    return ready is not None


def _recall(likeness: Hashable) -> Prepared | None:
    """The prepared call for a likeness, if there is one."""
    try:
        return _prepared.get(likeness)
    except TypeError:  # a variant holds another array
        return None


def _remember(
    likeness: Hashable,
    variants: tuple[Any, ...],
    arrays: tuple[Array, ...],
    call: Call,
    backward: bool,
) -> None:
    """Prepare for more calls like this one, once there has been another: lengths that grow from
    call to call are not worth it."""
    prepare = getattr(call.choice.backend, "prepare", None)
    if prepare is None or call.ndim == 2:
        return
    forms, _ = forms_of(variants)
    if not all(map(is_known, forms)):
        return
    if likeness not in _seen:
        insert(_seen, likeness, None)
        return
    ready = prepare(call.problem, backward, arrays)
    if ready is not None:
        insert(_prepared, likeness, ready)


def insert(table: dict[Hashable, Any], likeness: Hashable, value: Any) -> None:
    with _lock:
        while len(table) >= KEPT:
            del table[next(iter(table))]
        table[likeness] = value


def is_known(form: Any) -> bool:
    """Whether calls of one form are alike."""
    if type(form) is tuple and form[0] in _BY_VALUE:
        return all(_constant(value[-1]) or type(value[-1]) is bytes for value in form[1:])
    return isinstance(form, type) or _constant(form)  # a type is all that `apart` leaves


def _constant(value: Any) -> bool:
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is tuple:
        return all(map(_constant, value))
    return (
        type(value).__module__.startswith("qkv.variants.")
        and is_dataclass(value)
        and all(_constant(getattr(value, field.name)) for field in fields(value))
    )
