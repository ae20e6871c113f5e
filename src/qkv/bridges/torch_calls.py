"""`qkv.attention` of torch tensors: which way a call goes.

Where nobody can ask for derivatives and nothing looks on, qkv computes at once on the tensors'
memory. Else the call becomes an operation that torch differentiates, batches, traces or compiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv._recall import apart, are_constants, attend
from qkv._statement import Statement, hold, keep_for_good, restate, state
from qkv.arrays import is_array, view_beside
from qkv.arrays.torch_arrays import TorchArrays
from qkv.bridges import torch_devices as devices
from qkv.bridges import torch_functions as functions
from qkv.bridges.torch_operators import contiguous
from qkv.bridges.torch_recall import looks_on, recall, remember
from qkv.errors import UnsupportedError
from qkv.problem.rows import Paged, Quantized

__all__ = ["attention"]


def attention(
    query: Tensor,
    key: Any,
    value: Any,
    variants: tuple[Any, ...],
    scale: float | None,
    layout: Any,
    q_offset: Any,
    kv_offset: Any,
    return_lse: bool,
    backend: str,
) -> Any:
    """As `qkv.attention`."""
    said = variants, scale, layout, q_offset, kv_offset, backend
    if layout == "bhld" and are_constants(said):
        forms, read = apart(variants, Tensor)
        door = (forms, *said[1:]) if read else said
        found = recall(query, key, value, door, return_lse, read)
        if found is not None:
            return found
    keywords = {
        "scale": scale,
        "layout": layout,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "backend": backend,
    }
    if isinstance(key, Paged | Quantized) or isinstance(value, Paged | Quantized):
        _refuse_gradients(query, *_within(key), *_within(value))
        found = attend(query, key, value, variants, **keywords)[:2]
        return found if return_lse else found[0]
    query, key, value = _autocast(_tensor(query), _tensor(key), _tensor(value))
    keep = _keep if torch.compiler.is_dynamo_compiling() else None
    if not query.is_cpu or backend == "torch":
        devices.check_backend(query, backend)
        statement = state(variants, _is_array, keep, **keywords)
        arrays = [_tensor(array) for array in statement.arrays]
        if keep is None and torch._C._len_torch_dispatch_stack() > 0:
            hold(statement.named)
        return devices.attend(query, key, value, arrays, statement.text, return_lse)
    statement = state(variants, _is_array, keep, **keywords)
    arrays = [_tensor(array) for array in statement.arrays]
    if _is_watched(query, key, value, *arrays):
        if keep is None and torch._C._len_torch_dispatch_stack() > 0:
            hold(statement.named)  # whatever looks on may write the text down
        found = functions.attend(query, key, value, arrays, statement.text, statement.named)
    else:
        found = _at_once(query, key, value, variants, keywords, statement, arrays)
        forms, read = apart(variants, Tensor)
        if layout == "bhld" and len(read) == len(arrays):
            asked = query, key, value
            door = (forms, *said[1:]) if read else said
            remember(door, asked, asked, said, found[0])
    return found if return_lse else found[0]


def _at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variants: tuple[Any, ...],
    keywords: dict[str, Any],
    statement: Statement,
    arrays: list[Tensor],
) -> Any:
    # A call of NumPy arrays like an earlier one can be recalled.
    view, restore = _LIBRARY.view, _LIBRARY.restore
    q, k, v = view(query, "query"), view(key, "key"), view(value, "value")
    if arrays:
        views = [view(array, "an array of a variant") for array in arrays]
        restated = restate(statement.text, views)
        variants, keywords = restated.variants, restated.keywords
    out, lse, _ = attend(q, k, v, variants, **keywords)
    return contiguous(restore(out)), contiguous(restore(lse))


def _refuse_gradients(*arrays: Any) -> None:
    """Better to hear that there are none than to train nothing."""
    if any(isinstance(array, Tensor) and _LIBRARY.follows(array) for array in arrays):
        raise UnsupportedError(
            "torch differentiates this call, and paged or quantised rows have no way back.",
            action="Call it under torch.no_grad(), or gather the rows into a tensor first.",
        )


def _within(rows: Any) -> list[Any]:
    """The arrays that keys or values are read from."""
    match rows:
        case Paged(pages=pages):
            return _within(pages)
        case Quantized(values=values, scales=scales):
            return [values, scales]
    return [rows]


_keep = torch.compiler.assume_constant_result(keep_for_good)
"""Compiled code, and what it names, may live as long as the process. It takes score mods that were
made outside it, and their arrays as constants."""


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _tensor(array: Any) -> Any:
    """An array of any library as a tensor of the same memory, where torch can have that."""
    if isinstance(array, Tensor):
        return array
    if torch.compiler.is_dynamo_compiling() and isinstance(array, np.ndarray):
        return torch.as_tensor(array)  # which Dynamo knows
    if not is_array(array):
        return array
    seen = view_beside(_LIBRARY, array, "an array of the call")
    dense = seen.flags.writeable and min(seen.strides, default=0) >= 0
    return _LIBRARY.restore(seen if dense else seen.copy())


_LIBRARY = TorchArrays()


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the type that autocast asks for, as torch's own attention would take them."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype is torch.float64 else t.to(dtype) for t in tensors)


def _is_watched(*tensors: Tensor) -> bool:
    """Whether torch must see the operation, or changes what it is given."""
    return (
        looks_on()
        or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        or any(type(t) not in PLAIN for t in tensors)
    )


PLAIN = (Tensor, torch.nn.Parameter)
