"""Attention between two graphs of torch's compiler, for what cannot be part of one.

Importing this imports the compiler; only what the compiler reads does so.
"""

from __future__ import annotations

import torch

__all__ = ["call_outside", "differentiate_outside"]


call_outside = torch.compiler.disable(
    lambda function, *given: function(*given),
    reason="this call of qkv.attention has a function of scores or positions that calls NumPy's "
    "functions, and reads tensors or is made inside of the compiled function. Write it with those "
    "of torch, as torch.where; or compile without fullgraph=True, or export with strict=False",
)
"""Make a call, a function and its arguments, where the compiler does not read it."""

differentiate_outside = torch.compiler.disable(
    lambda function, *given: function(*given),
    reason="torch.func or forward mode differentiates a call of qkv.attention inside of the "
    "compiled function. Compile inside of the derivative, as in torch.func.grad(torch.compile(f)); "
    "or compile without fullgraph=True",
)
"""The same, for calls that are differentiated while the compiler reads them."""
