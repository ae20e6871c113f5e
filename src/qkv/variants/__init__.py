"""One variant a file; `ALL` lists them for tests and documents.

masks           those that forbid pairs, and their algebra
scores          those that change scores
rope            rotates query and key
sinks           adds to the denominator of the softmax
dropout         drops weights after it
base            the base class of all of them
captured        functions as variants: what they capture, and what of it may change
as_variant      the variant that a bare array means
"""

from __future__ import annotations

from qkv.variants.base import Variant
from qkv.variants.dropout import Dropout
from qkv.variants.masks.algebra import AllOf, AnyOf, MaskVariant, Not
from qkv.variants.masks.block_sparse import BlockSparse
from qkv.variants.masks.causal import Causal
from qkv.variants.masks.dense_mask import Mask
from qkv.variants.masks.global_tokens import GlobalTokens
from qkv.variants.masks.key_lengths import KeyLengths
from qkv.variants.masks.prefix import Prefix
from qkv.variants.masks.random_blocks import RandomBlocks
from qkv.variants.masks.segments import Segments
from qkv.variants.masks.sliding_window import SlidingWindow
from qkv.variants.masks.strided import Strided
from qkv.variants.rope import RoPE
from qkv.variants.scores.alibi import ALiBi
from qkv.variants.scores.bias import Bias
from qkv.variants.scores.relative_bias import RelativeBias
from qkv.variants.scores.score_mod import ScoreMod
from qkv.variants.scores.softcap import Softcap
from qkv.variants.sinks import Sinks

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
