"""One variant a file; `ALL` lists them for tests and documents."""

from __future__ import annotations

from qkv.variants.algebra import AllOf, AnyOf, MaskVariant, Not
from qkv.variants.alibi import ALiBi
from qkv.variants.base import Variant
from qkv.variants.bias import Bias
from qkv.variants.block_sparse import BlockSparse
from qkv.variants.causal import Causal
from qkv.variants.dense_mask import Mask
from qkv.variants.dropout import Dropout
from qkv.variants.global_tokens import GlobalTokens
from qkv.variants.key_lengths import KeyLengths
from qkv.variants.prefix import Prefix
from qkv.variants.random_blocks import RandomBlocks
from qkv.variants.relative_bias import RelativeBias
from qkv.variants.rope import RoPE
from qkv.variants.score_mod import ScoreMod
from qkv.variants.segments import Segments
from qkv.variants.sinks import Sinks
from qkv.variants.sliding_window import SlidingWindow
from qkv.variants.softcap import Softcap
from qkv.variants.strided import Strided

ALL: tuple[type[Variant], ...] = (
    Causal,
    SlidingWindow,
    KeyLengths,
    Segments,
    Prefix,
    GlobalTokens,
    Strided,
    BlockSparse,
    RandomBlocks,
    Mask,
    AnyOf,
    AllOf,
    Not,
    Bias,
    ALiBi,
    RelativeBias,
    Softcap,
    ScoreMod,
    RoPE,
    Sinks,
    Dropout,
)

__all__ = [
    "ALL",
    "ALiBi",
    "AllOf",
    "AnyOf",
    "Bias",
    "BlockSparse",
    "Causal",
    "Dropout",
    "GlobalTokens",
    "KeyLengths",
    "Mask",
    "MaskVariant",
    "Not",
    "Prefix",
    "RandomBlocks",
    "RelativeBias",
    "RoPE",
    "ScoreMod",
    "Segments",
    "Sinks",
    "SlidingWindow",
    "Softcap",
    "Strided",
    "Variant",
]
