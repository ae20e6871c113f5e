"""Attention for torch: a drop-in, and the modules that texts teach and models are made of.

`qkv.attention` and `qkv.inspect` take tensors themselves, and give gradients, forward and reverse.
"""

# Registers the operators, which programs that were exported name.
from qkv.bridges.torch.operations import operators as _operators  # noqa: F401
from qkv.torch.drop_in import scaled_dot_product_attention
from qkv.torch.modules import Cache, MultiHeadAttention, ScaledDotProductAttention

__all__ = [
    "Cache",
    "MultiHeadAttention",
    "ScaledDotProductAttention",
    "scaled_dot_product_attention",
]
