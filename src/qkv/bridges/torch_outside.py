"""Attention between two graphs of torch's compiler, for what cannot be part of one.

Importing this imports the compiler; only what the compiler reads does so.
"""

from __future__ import annotations

import torch

from qkv.bridges.torch_eager import attention

__all__ = ["attention_outside"]

attention_outside = torch.compiler.disable(
    attention,
    reason="this call of qkv.attention has a score mod that is made inside of the compiled "
    "function, or that reads tensors, which are no constants of a graph. Compile without "
    "fullgraph=True, export with strict=False, or make a score mod that reads no tensors outside "
    "of the function",
)
