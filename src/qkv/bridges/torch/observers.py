"""Whether torch observes operations: traces or transforms them, or changes their inputs."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = ["follows", "has_modes", "looks_on"]

_is_compiling = torch.compiler.is_compiling
_is_autocast = torch.is_autocast_enabled
_is_any_autocast = torch._C._is_any_autocast_enabled
_transforms = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_key = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_tracing_state = torch._C._get_tracing_state


def looks_on() -> bool:
    """Whether torch traces or changes operations, whatever they are given."""
    return (_is_any_autocast() and _is_autocast("cpu")) or follows()


def follows() -> bool:
    """Whether torch traces or transforms operations, whatever they are given."""
    return (
        _is_compiling()
        or _transforms()
        or forward_ad._current_level >= 0
        or has_modes()
        or _tracing_state() is not None
    )


def has_modes() -> bool:
    """Whether a mode sees every operator; `make_fx(pre_dispatch=True)` has a stack of its own."""
    return _dispatch_modes() > 0 or _has_key(_PRE_DISPATCH)
