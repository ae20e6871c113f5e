"""Calls on tensors like an earlier one: nothing is looked at but types, shapes, strides, addresses.

As `qkv._recall` does for NumPy arrays, whose prepared calls these are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from qkv._recall import KEPT, Said, apart, prepared
from qkv.arrays.torch_arrays import TorchArrays
from qkv.backends import AddressedCall, generation
from qkv.bridges.torch_guards import Guard, guard

__all__ = ["follows", "looks_on", "recall", "remember"]

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
    empty_out: Callable[[], Tensor]
    empty_lse: Callable[[], Tensor]


_known: dict[Hashable, _Known] = {}
_latest: dict[Hashable, _Known] = {}
"""By door: calls follow one another that are alike, and whether they are is quickly asked."""


def looks_on() -> bool:
    """Whether torch traces or changes operations, whatever they are given."""
    return _is_autocast("cpu") or follows()


def follows() -> bool:
    """Whether torch traces or transforms operations, whatever they are given."""
    return (
        _is_compiling()
        or _transforms()
        or forward_ad._current_level >= 0
        or _dispatch_modes() > 0
        or _tracing_state() is not None
    )


def recall(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    door: Hashable,
    rows: bool,
    arrays: tuple[Tensor, ...] = (),
) -> Any:
    """Output, with lse if `rows`; None if no such call is known, or torch has to see it.

    `door` is which function was called, and with what else; `arrays` are masks and biases.
    """
    if looks_on():
        return None
    try:
        known = _latest[door]
        if known.generation != generation() or not known.fits(query, key, value, *arrays):
            if not _are_plain(query, key, value, *arrays):
                return None
            known = _latest[door] = _known[_likeness(query, key, value, arrays, door)]
    except (KeyError, TypeError):  # nothing like it is known, or something said is an array
        return None
    out = known.empty_out()
    q, k, v, o = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
    read = [array.data_ptr() for array in arrays] if arrays else ()
    if not rows:
        kept: Any = query, key, value, out, arrays
        return out if known.run(q, k, v, o, 0, 0, kept, read) else None
    lse = known.empty_lse()
    kept = query, key, value, out, lse, arrays
    return (out, lse) if known.run(q, k, v, o, lse.data_ptr(), 0, kept, read) else None


def remember(door: Hashable, asked: Tensors, attended: Tensors, said: Said, out: Tensor) -> None:
    """Keep a call if its NumPy arrays have been prepared for.

    The door was asked to attend to `asked`, which came to `qkv.attention` of `attended`, at the
    same addresses, and `said`. It gave `out`.
    """
    variants, *others = said
    _, arrays = apart(variants, Tensor)
    if looks_on() or not _are_plain(*asked, *arrays):
        return
    q, k, v = (_view(tensor, "operand") for tensor in attended)
    call = prepared(q, k, v, (_viewed(variants), *others))
    if call is None or not isinstance(call, AddressedCall):
        return
    wide = torch.float64 if out.dtype is torch.float64 else torch.float32
    makers = _maker(out.shape, out.dtype), _maker(out.shape[:-1], wide)
    known = _Known(guard(*asked, *arrays), generation(), call.run, *makers)
    _insert(_known, _likeness(*asked, arrays, door), known)
    _insert(_latest, door, known)


def _viewed(variants: tuple[Any, ...]) -> tuple[Any, ...]:
    """Variants that read NumPy arrays in the place of tensors."""
    if not variants:
        return ()
    forms, arrays = apart(variants, Tensor)
    views = iter([_view(array, "an array of a variant") for array in arrays])
    # A form that is a type has lost its tensor.
    return tuple(
        form if not isinstance(form, type) else next(views) if form is Tensor else form(next(views))
        for form in forms
    )


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


def _likeness(
    query: Tensor, key: Tensor, value: Tensor, arrays: tuple[Tensor, ...], door: Hashable
) -> Hashable:
    """What plain tensors in calls that are like one another have in common."""
    return (
        query.dtype, query.shape, query.stride(),
        key.dtype, key.shape, key.stride(),
        value.dtype, value.shape, value.stride(),
        query is key, key is value, door, generation(),
        *[(array.dtype, array.shape, array.stride()) for array in arrays],
    )  # fmt: skip


def _maker(shape: torch.Size, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Makes dense tensors in main memory, whatever torch's default device is."""
    empty = _empty_of_compiled_code()
    if empty is not None:
        strides = torch.empty(shape, device="meta").stride()
        return partial(empty, tuple(shape), strides, dtype)
    # The quickest of what is documented: like one number that is expanded.
    number = torch.empty((), dtype=dtype, device="cpu")
    return partial(torch.empty_like, number.expand(shape))


@lru_cache(maxsize=1)
def _empty_of_compiled_code() -> Callable[..., Tensor] | None:
    """`empty(shape, strides, dtype)` of torch's compiled code, if it does what its name says."""
    try:
        guards: Any = torch._C._dynamo.guards
        made = guards._empty_strided_cpu((2, 3), (3, 1), torch.float16)
    except (AttributeError, TypeError):
        return None
    said = made.shape == (2, 3) and made.stride() == (3, 1) and made.dtype is torch.float16
    return guards._empty_strided_cpu if said and made.is_cpu else None
