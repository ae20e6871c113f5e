"""`qkv.attention` of torch tensors that no compiler reads.

Where nobody can ask for derivatives and nothing looks on, qkv computes at once on the tensors'
memory. Else the call becomes an operation that torch differentiates, batches or traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from qkv._dynamo import ends_graph
from qkv.arrays.torch_arrays import check_beside, check_dense
from qkv.arrays.views import view_beside
from qkv.bridges.learnable import refuse_constants, refuse_undeclared
from qkv.bridges.torch.observers import has_modes, looks_on
from qkv.bridges.torch.onnx import as_torch_operations
from qkv.bridges.torch.openmp import on_torch_threads
from qkv.bridges.torch.operands import (
    LIBRARY,
    PLAIN,
    as_tensor,
    autocast,
    check_devices,
    is_tracked,
    kept_tensor,
    operand,
)
from qkv.bridges.torch.operations import functions
from qkv.bridges.torch.operations.device_operators import attend_later, reads_later
from qkv.bridges.torch.operations.operators import contiguous
from qkv.call.attend import attend
from qkv.call.binding.bound import BoundCall, Structure, bind
from qkv.call.binding.structure_text import hold, names_objects
from qkv.call.device_call import check_device_call, names_device_backend
from qkv.call.merging import merge_parts
from qkv.errors import UnsupportedError
from qkv.process.forks import on_one_torch_thread

__all__ = ["attend_on_device", "attention", "merge", "refuse_export"]


@on_one_torch_thread
def attention(bound: BoundCall, variants: tuple[Any, ...], return_lse: bool) -> Any:
    """`qkv.attention` of a bound call that no run takes; `variants` as they were given."""
    with on_torch_threads():
        refuse_constants(variants, is_tracked)
        refuse_undeclared(bound.structure, is_tracked)
        if torch.onnx.is_in_onnx_export():
            query, key, value, _, options, _ = bound.unflatten()
            written = as_torch_operations(query, key, value, variants, options)
            bound = bind(query, key, value, *written)
        return _attend(bound, return_lse)


def _attend(bound: BoundCall, return_lse: bool) -> Any:
    if not bound.structure.is_plain:
        _refuse_gradients(*bound.leaves[: bound.structure.operand_leaves])
        results = attend(bound)
        return (results.out, results.lse) if return_lse else results.out
    query, key, value = map(operand, bound.leaves[:3], _ROLES)
    roles = bound.roles[3:] if len(bound.leaves) > 3 else []
    for leaf, role in zip(bound.leaves[3:], roles, strict=True):
        if isinstance(leaf, Tensor):
            check_dense(leaf, role)
            check_beside(leaf, role, query)
    operands = query, key, value
    leaves = autocast(*operands)
    if query.device.type != "cpu" or names_device_backend(bound.structure):
        check_devices(*leaves)
        tensors = tuple(map(as_tensor, bound.leaves[3:], roles))
        return attend_on_device(BoundCall(bound.structure, (*leaves, *tensors)), return_lse)
    if _is_watched(*leaves, *bound.leaves[3:]):
        check_devices(*leaves)
        query, key, value = map(kept_tensor, leaves, bound.leaves)
        leaves = query, key, value
        given = zip(bound.leaves[3:], roles, strict=True)
        tensors = tuple([kept_tensor(as_tensor(leaf, role), leaf) for leaf, role in given])
        _refuse_half_fake(*leaves, *tensors)
        _hold_if_seen(bound.structure)
        try:
            out, lse = functions.attend(*leaves, tensors, bound.structure)
        except (NotImplementedError, TypeError) as error:
            if "qkv" in str(error):
                _explain_subclasses(error, *leaves, *tensors)
            raise
        return (out, lse) if return_lse else out
    views = [view_beside(LIBRARY, *given) for given in zip(bound.leaves[3:], roles, strict=True)]
    seen = BoundCall(bound.structure, (*map(LIBRARY.view, leaves, _ROLES), *views))
    attended = attend(seen, rows=return_lse)
    out = contiguous(LIBRARY.restore(attended.out))
    return (out, contiguous(LIBRARY.restore(attended.lse))) if return_lse else out


def merge(parts: Sequence[tuple[Any, Any]], layout: Any) -> Any:
    """`qkv.merge` by functions of torch, where torch must see them; None elsewhere.

    What NumPy computes would be a constant of a trace, and tensors without values have none for it.
    """
    if not _is_watched(*chain(*parts)):
        return None
    tensors = [(as_tensor(out), as_tensor(lse)) for out, lse in parts]
    _refuse_half_fake(*chain(*tensors))
    try:
        return merge_parts(tensors, layout, torch)
    except (NotImplementedError, RecursionError, TypeError) as error:
        _explain_subclasses(error, *chain(*tensors))
        raise


def attend_on_device(bound: BoundCall, return_lse: bool) -> Any:
    device = bound.leaves[0].device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # Autocast converts the operands; scores and sums keep their own type.
        with torch.autocast(device, enabled=False):
            return attend_on_device(bound, return_lse)
    if reads_later(bound):
        _hold_if_seen(bound.structure)
        out, lse = attend_later(bound, lse=return_lse)
    else:
        out, lse = check_device_call(bound).attend(lse=return_lse)
    return (out, lse) if return_lse else out


_NOT_PORTABLE = "this call is exported with a variant that only this process knows"
_INSTEAD = (
    "Make its class a dataclass with roles, in a module that can be imported; export a ScoreMod of "
    "operators and functions, whose arrays are tensors, with strict=False."
)


def refuse_export() -> None:
    raise UnsupportedError(f"{_NOT_PORTABLE}.", action=_INSTEAD)


ends_graph(refuse_export, reason=f"{_NOT_PORTABLE}. {_INSTEAD}")


def _hold_if_seen(structure: Structure) -> None:
    """Whatever looks on may write the text of the structure down."""
    if torch.compiler.is_exporting() and names_objects(structure.text):
        refuse_export()
    if has_modes():
        hold(structure)


def _refuse_gradients(*arrays: Any) -> None:
    """Refuse gradients: it is better to hear that there are none than to train nothing."""
    if any(isinstance(array, Tensor) and LIBRARY.is_tracked(array) for array in arrays):
        raise UnsupportedError(
            "torch differentiates this call, and paged or quantised rows have no gradient.",
            action="Call it under torch.no_grad(), or gather the rows into a tensor first.",
        )


def _explain_subclasses(error: Exception, *tensors: Any) -> None:
    """Tensors of classes of their own decide which operators they take."""
    names = {type(t).__name__ for t in tensors if isinstance(t, Tensor) and type(t) not in PLAIN}
    if names:
        raise UnsupportedError(
            f"{' and '.join(sorted(names))} refuses operators that it does not know.",
            [("torch says", str(error).splitlines()[0][:200])],
            "Pass plain tensors.",
        ) from error


def _refuse_half_fake(*tensors: Any) -> None:
    """Fake tensors beside real ones, which torch joins only inside a mode that makes them."""
    fake = [type(t).__module__ == "torch._subclasses.fake_tensor" for t in tensors]
    if any(fake) and not all(fake) and torch._C._len_torch_dispatch_stack() == 0:
        raise UnsupportedError(
            "fake tensors, which have no values, stand beside real ones.",
            [("fake", f"{sum(fake)} of {len(fake)} arrays of the call")],
            "Call it inside their FakeTensorMode, or convert all arrays with it.",
        )


_ROLES = ("query", "key", "value")


def _is_watched(*arrays: Any) -> bool:
    """Whether torch must see the operation, or changes what it is given."""
    tensors = [array for array in arrays if isinstance(array, Tensor)]
    return (
        looks_on()
        or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        or any(type(t) not in PLAIN for t in tensors)
    )
