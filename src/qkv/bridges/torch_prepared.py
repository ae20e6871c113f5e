"""Prepared calls of tensors: nothing is looked at but types, shapes, strides, addresses.

The calls are those that `qkv.call.attend` has prepared for NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from qkv.arrays.torch_arrays import TorchArrays
from qkv.backends import RepeatedCall, generation
from qkv.bridges.torch_guards import Guard, guard
from qkv.bridges.torch_openmp import on_torch_threads
from qkv.call.attend import addressed
from qkv.call.bound import BoundCall, Structure
from qkv.call.cache import CALLS, Key
from qkv.call.flatten import without_arrays
from qkv.call.keys import MAX_VALUE_BYTES

__all__ = [
    "PreparedTensors",
    "are_dense",
    "are_plain",
    "array_bytes",
    "empty_maker",
    "follows",
    "gradients_wanted",
    "keep",
    "leaf_values",
    "looks_on",
    "prepare",
    "read_in_place",
    "remember",
    "remember_call",
    "run_latest",
    "run_prepared",
]

_view = TorchArrays().view
_is_compiling = torch.compiler.is_compiling
_is_autocast = torch.is_autocast_enabled
_is_any_autocast = torch._C._is_any_autocast_enabled
_transforms = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state


class PreparedTensors(Protocol):
    """A prepared call of tensors."""

    @property
    def fits(self) -> Guard:
        """Whether the tensors that are read in place are like those that were prepared for."""
        ...

    @property
    def values(self) -> tuple[bytes, ...]:
        """Those of the other tensors, in bytes."""
        ...

    @property
    def generation(self) -> int:
        """That of the backends."""
        ...

    def compute(self, bound: BoundCall, read: Sequence[Any], rows: bool) -> Any:
        """Output, with lse if `rows`, of a call whose tensors fit; None if something else does not.

        `read` are the leaves that are read in place.
        """
        ...


class _PreparedCall(NamedTuple):
    """A prepared call of tensors with these sizes and strides.

    `brief` runs it on the caller's thread alone, if it is brief.
    """

    fits: Guard
    values: tuple[bytes, ...]
    generation: int
    run: Callable[..., bool]
    brief: Callable[..., bool] | None
    empty_out: Callable[[], Tensor]
    empty_lse: Callable[[], Tensor]
    rows_first: bool

    def compute(self, bound: BoundCall, read: Sequence[Any], rows: bool) -> Any:
        """See `PreparedTensors`."""
        query, key, value, *arrays = read
        at_query, at_key, at_value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if not (at_query and at_key and at_value):  # Their memory has been freed, as FSDP does.
            return None
        out = self.empty_out()
        lse = self.empty_lse() if rows else None
        at_out, at_lse = out.data_ptr(), 0 if lse is None else lse.data_ptr()
        if self.brief is not None:
            done = self.brief(at_query, at_key, at_value, at_out, at_lse)
        else:
            places = [array.data_ptr() for array in arrays]
            addresses = at_query, at_key, at_value, at_out, at_lse, 0, places
            with on_torch_threads():
                done = self.run(addresses, (read, out, lse))
        if not done:
            return None
        if self.rows_first:
            out = out.transpose(-3, -2).contiguous()
        return out if lse is None else (out, lse)


def looks_on() -> bool:
    """Whether torch traces or changes operations, whatever they are given."""
    return (_is_any_autocast() and _is_autocast("cpu")) or follows()


def follows() -> bool:
    """Whether torch traces or transforms operations, whatever they are given."""
    return (
        _is_compiling()
        or _transforms()
        or forward_ad._current_level >= 0
        or _dispatch_modes() > 0
        or _tracing_state() is not None
    )


def run_latest(bound: BoundCall, rows: bool) -> Any:
    """Output, with lse if `rows`, of a call like the latest one of its structure; else None.

    None too if torch has to see the call.
    """
    structure, read = bound
    known: PreparedTensors | None = CALLS.get(("latest tensors", structure))
    if known is None or known.generation != generation() or looks_on():
        return None
    if len(read) > 3:
        read = read_in_place(bound)
        if leaf_values(bound) != known.values:
            return None
    try:
        for tensor in read:
            if tensor.is_nested:  # Asked for its shape by `fits`, it would end the process.
                return None
        if not known.fits(*read):
            return None
    except (AttributeError, TypeError):  # An operand is not a tensor.
        return None
    return known.compute(bound, read, rows)


def run_prepared(bound: BoundCall, rows: bool) -> Any:
    """Output, with lse if `rows`; None if nothing was prepared, or torch has to see the call."""
    if looks_on():
        return None
    structure = bound.structure
    read = read_in_place(bound)
    values = leaf_values(bound)
    if values is None or not are_dense(*read):
        return None
    known: PreparedTensors | None = CALLS.get(_key(structure, read, values))
    if known is None:
        return None
    remember(structure, known)
    return known.compute(bound, read, rows)


def keep(
    bound: BoundCall, read: Sequence[Tensor], values: tuple[bytes, ...], known: PreparedTensors
) -> None:
    """Keep a call for more calls like this one."""
    structure = without_arrays(bound.structure)
    CALLS.insert(_key(structure, read, values), known)
    remember(structure, known)


def remember(structure: Structure, known: PreparedTensors) -> None:
    """Try this call first when there is another one of the same structure."""
    latest = "latest tensors", structure
    if not CALLS.replace(latest, known):
        CALLS.insert(without_arrays(latest), known)


def remember_call(
    structure: Structure,
    values: tuple[bytes, ...],
    read: Sequence[Tensor],
    call: RepeatedCall,
    empty_out: Callable[[], Tensor],
    empty_lse: Callable[[], Tensor],
) -> None:
    """Try a call for tensors of these very sizes and strides first."""
    fits, brief = guard(*read), call.brief()
    what = fits, values, generation(), call.run, brief, empty_out, empty_lse
    remember(structure, _PreparedCall(*what, rows_first=False))


def read_in_place(bound: BoundCall) -> Sequence[Any]:
    """The leaves that are read where they lie: the operands, and arrays of variants."""
    by_value = bound.structure.by_value
    if not by_value:
        return bound.leaves
    return [leaf for n, leaf in enumerate(bound.leaves) if n not in by_value]


def prepare(bound: BoundCall, seen: BoundCall, out: Tensor) -> None:
    """Keep a call of tensors if it was prepared for as one of NumPy arrays.

    Parameters
    ----------
    bound, seen : BoundCall
        The call as it was bound, and of NumPy views of the same memory.
    out : Tensor
        What it gave.
    """
    read = read_in_place(bound)
    values = leaf_values(bound)
    if values is None or out.ndim < 3 or looks_on() or not are_plain(*read):
        return
    wide = torch.float64 if out.dtype is torch.float64 else torch.float32
    rows_first = bound.structure.layout == "blhd"
    shape = out.transpose(-3, -2).shape if rows_first else out.shape
    makers = empty_maker(shape, out.dtype), empty_maker(shape[:-1], wide)
    call = addressed(seen)
    if call is None:
        return
    brief = call.brief() if isinstance(call, RepeatedCall) else None
    fits = guard(*read)
    known = _PreparedCall(fits, values, generation(), call.run, brief, *makers, rows_first)
    keep(bound, read, values, known)


def leaf_values(bound: BoundCall) -> tuple[bytes, ...] | None:
    """The bytes of the arrays that are compared by value, None if these are too many."""
    if not bound.structure.by_value:
        return ()
    found = []
    for n in bound.structure.by_value:
        values = array_bytes(bound.leaves[n])
        if values is None:
            return None
        found.append(values)
    return tuple(found)


def array_bytes(array: Any) -> bytes | None:
    """The bytes of an array that is compared by value; None if these are too many, or a gradient
    is wanted."""
    if isinstance(array, Tensor):
        if not array.is_cpu or array.nbytes > MAX_VALUE_BYTES or type(array) not in _PLAIN:
            return None
        if array.requires_grad and torch.is_grad_enabled():
            return None
        array = _view(array, "an array of a variant")
    if type(array) is not np.ndarray or array.nbytes > MAX_VALUE_BYTES:
        return None
    return array.tobytes()


_PLAIN = (Tensor, torch.nn.Parameter)


def are_plain(*tensors: Any) -> bool:
    """Whether these are tensors, dense numbers at an address, that want no gradients."""
    return are_dense(*tensors) and not gradients_wanted(tensors)


def gradients_wanted(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """Which of these tensors want gradients; nothing if none does."""
    if not torch.is_grad_enabled():
        return ()
    wanted = tuple([tensor.requires_grad for tensor in tensors])
    return wanted if True in wanted else ()


def are_dense(*tensors: Any) -> bool:
    """Whether these are tensors, dense numbers at an address."""
    for t in tensors:
        if type(t) is not Tensor or t.is_nested or not t.is_cpu or t.layout is not torch.strided:
            return False
        if t.is_neg():
            return False
    return True


def _key(structure: Any, read: Sequence[Tensor], values: tuple[bytes, ...]) -> Key:
    """The key of a repeated call of plain tensors."""
    query, key, value, *_ = read
    return (
        "tensors", structure, values, query is key, key is value, generation(),
        gradients_wanted(read),
        *[(tensor.dtype, tensor.shape, tensor.stride()) for tensor in read],
    )  # fmt: skip


def empty_maker(shape: Sequence[int], dtype: torch.dtype) -> Callable[[], Tensor]:
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
    fits = made.shape == (2, 3) and made.stride() == (3, 1) and made.dtype is torch.float16
    return guards._empty_strided_cpu if fits and made.is_cpu else None
