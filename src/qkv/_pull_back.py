"""The way back of a call whose output and lse were kept elsewhere, recalled where it can be.

A way back is like an earlier one if the calls are (`_recall`), nothing but query, key and value is
to have gradients, and what was kept and the cotangents have the same types, shapes and strides.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv._call import Call
from qkv._recall import Said, forms_of, insert, is_known, likeness, turned
from qkv._vjp import Gradients, Pullback
from qkv.backends import PreparedBackward
from qkv.problem.backward import BackwardInputs

__all__ = ["Left", "pull_back"]

Array = NDArray[Any]

_prepared: dict[Hashable, PreparedBackward] = {}
_seen: dict[Hashable, None] = {}


class Left(NamedTuple):
    """What the forward pass left, as the front door gave it; `lse_rest` is NaN if nobody knows."""

    out: Array
    lse: Array
    lse_rest: Array


def pull_back(
    query: Array,
    key: Array,
    value: Array,
    variants: tuple[Any, ...],
    keywords: Mapping[str, Any],
    left: Left,
    grad_out: Array,
    grad_lse: Array | None = None,
    wrt: Sequence[Any] = (),
) -> Gradients:
    """Gradients of NumPy arrays as `pullback(grad_out, grad_lse, wrt)` of `qkv.vjp` gives them."""
    said: Said = (variants, *(keywords[name] for name in _NAMES))
    blhd = keywords["layout"] == "blhd"
    q, k, v, out, along = (
        turned(a) if blhd else a for a in (query, key, value, left.out, grad_out)
    )
    call_like, arrays = likeness(q, k, v, said, backward=True)
    like = None
    if call_like is not None and not wrt:
        beside = out, left.lse, left.lse_rest, along, grad_lse
        forms = [None if a is None else (a.dtype, a.shape, a.strides) for a in beside]
        like = (call_like, *forms)
    ready = _known(like)
    if ready is not None:
        found = ready(q, k, v, out, left.lse, left.lse_rest, along, grad_lse, arrays)
        if found is not None:
            d_q, d_k, d_v = (np.ascontiguousarray(turned(a)) if blhd else a for a in found)
            return Gradients(d_q, d_k, d_v)
        _prepared.pop(like, None)
    call = Call.bind(query, key, value, variants, **keywords, backward=True)
    shapes = query.shape, key.shape, value.shape
    pullback = Pullback.resumed(call, left.out, left.lse, shapes, left.lse_rest)
    gradients = pullback(grad_out, grad_lse, wrt)
    operands = call.problem.operands
    views = operands.query, operands.key, operands.value
    whole = [view.shape for view in views] == [q.shape, k.shape, v.shape]
    if like is not None and whole and all(map(is_known, forms_of(variants)[0])):
        _remember(like, arrays, call, pullback.inputs(grad_out, grad_lse))
    return gradients


_NAMES = ("scale", "layout", "q_offset", "kv_offset", "backend")


def _known(like: Hashable | None) -> PreparedBackward | None:
    try:
        return None if like is None else _prepared.get(like)
    except TypeError:  # a variant holds another array
        return None


def _remember(
    like: Hashable, arrays: tuple[Array, ...], call: Call, inputs: BackwardInputs
) -> None:
    """Prepare for more like this one, once there has been another."""
    prepare = getattr(call.choice.backend, "prepare_backward", None)
    if prepare is None:
        return
    if like not in _seen:
        insert(_seen, like, None)
        return
    ready = prepare(call.problem, inputs, arrays)
    if ready is not None:
        insert(_prepared, like, ready)
