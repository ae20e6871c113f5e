"""Calls on tensors like an earlier one: nothing is looked at but types, shapes, strides, addresses.

As `qkv._recall` does for NumPy arrays, whose prepared calls these are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qkv._recall import KEPT, Said, prepared
from qkv.arrays.torch_arrays import TorchArrays
from qkv.backends import AddressedCall, generation
from qkv.bridges.torch_guards import Guard, guard

__all__ = ["looks_on", "recall", "remember"]

_view = TorchArrays().view
_is_compiling = torch.compiler.is_compiling
_is_autocast = torch.is_autocast_enabled
_transforms = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state


Tensors: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""


class _Known(NamedTuple):
    """A prepared call, and what its results are written to."""

    fits: Guard
    generation: int
    run: Callable[..., bool]
    empty_out: Callable[[Tensor], Tensor]
    empty_lse: Callable[[Tensor], Tensor]


_known: dict[Hashable, _Known] = {}
_latest: dict[Hashable, _Known] = {}
"""By door: calls follow one another that are alike, and whether they are is quickly asked."""


def looks_on() -> bool:
    """Whether torch traces or changes operations, whatever they are given."""
    return (
        _is_compiling()
        or _is_autocast("cpu")
        or _transforms()
        or forward_ad._current_level >= 0
        or _dispatch_modes() > 0
        or _tracing_state() is not None
    )


def recall(query: Tensor, key: Tensor, value: Tensor, door: Hashable, rows: bool) -> Any:
    """Output, with lse if `rows`; None if no such call is known, or torch has to see it.

    `door` is which function was called, and with what else.
    """
    if looks_on():
        return None
    try:
        known = _latest[door]
        if known.generation != generation() or not known.fits(query, key, value):
            if not _are_plain(query, key, value):
                return None
            known = _latest[door] = _known[_likeness(query, key, value, door)]
    except (KeyError, TypeError):  # nothing like it is known, or something said is an array
        return None
    out = known.empty_out(query)
    q, k, v, o = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
    if not rows:
        return out if known.run(q, k, v, o, 0, 0, (query, key, value, out)) else None
    lse = known.empty_lse(query)
    kept = query, key, value, out, lse
    return (out, lse) if known.run(q, k, v, o, lse.data_ptr(), 0, kept) else None


def remember(door: Hashable, asked: Tensors, attended: Tensors, said: Said, out: Tensor) -> None:
    """Keep a call if its NumPy arrays have been prepared for.

    The door was asked to attend to `asked`, which came to `qkv.attention` of `attended`, at the
    same addresses, and `said`. It gave `out`.
    """
    if looks_on() or not _are_plain(*asked):
        return
    q, k, v = (_view(tensor, "operand") for tensor in attended)
    call = prepared(q, k, v, said)
    if not isinstance(call, AddressedCall):
        return
    query = asked[0]
    wide = torch.float64 if out.dtype is torch.float64 else torch.float32
    shape = out.shape[:-1]
    known = _Known(
        guard(*asked),
        generation(),
        call.run,
        _maker(query, out),
        lambda query: query.new_empty(shape, dtype=wide),
    )
    _insert(_known, _likeness(*asked, door), known)
    _insert(_latest, door, known)


def _insert(table: dict[Hashable, _Known], name: Hashable, known: _Known) -> None:
    while len(table) >= KEPT:
        table.pop(next(iter(table)), None)
    table[name] = known


def _are_plain(*tensors: Tensor) -> bool:
    """Whether tensors are all that they say: dense numbers at an address, without gradients."""
    return all(
        type(t) is Tensor and t.is_cpu and t.layout is torch.strided and not t.is_neg()
        and not (t.requires_grad and torch.is_grad_enabled())
        for t in tensors
    )  # fmt: skip


def _likeness(query: Tensor, key: Tensor, value: Tensor, door: Hashable) -> Hashable:
    """What plain tensors in calls that are like one another have in common."""
    return (
        query.dtype, query.shape, query.stride(),
        key.dtype, key.shape, key.stride(),
        value.dtype, value.shape, value.stride(),
        door, generation(),
    )  # fmt: skip


def _maker(query: Tensor, out: Tensor) -> Callable[[Tensor], Tensor]:
    """Makes outputs like `out` for queries like `query`; whichever is quickest.

    On the query's device, whatever torch's default is.
    """
    shape = out.shape
    for make in (
        torch.empty_like,
        partial(torch.empty_like, memory_format=torch.contiguous_format),
    ):
        made = make(query)
        if (made.shape, made.stride()) == (shape, out.stride()):
            return make
    return lambda query: query.new_empty(shape)
