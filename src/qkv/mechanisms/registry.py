"""Every mechanism by its command-line name; a new one adds its class to the list."""

from __future__ import annotations

from qkv.arguments.declarations import shown
from qkv.arguments.spelling import did_you_mean
from qkv.errors import ArgumentError
from qkv.mechanisms.base.mechanism import Mechanism
from qkv.mechanisms.heads.causal import Causal
from qkv.mechanisms.heads.cross import Cross
from qkv.mechanisms.heads.differential import Differential
from qkv.mechanisms.heads.grouped_query import GroupedQuery
from qkv.mechanisms.heads.multi_head import MultiHead
from qkv.mechanisms.heads.multi_head_latent import MultiHeadLatent
from qkv.mechanisms.heads.multi_query import MultiQuery
from qkv.mechanisms.heads.self_attention import Self
from qkv.mechanisms.linear_time.gated_delta import GatedDelta
from qkv.mechanisms.linear_time.linear import Linear
from qkv.mechanisms.linear_time.linformer import Linformer
from qkv.mechanisms.linear_time.mamba import Mamba
from qkv.mechanisms.linear_time.mamba2 import Mamba2
from qkv.mechanisms.linear_time.performer import Performer
from qkv.mechanisms.linear_time.rwkv4 import RWKV4
from qkv.mechanisms.linear_time.rwkv6 import RWKV6
from qkv.mechanisms.lookup.additive import Additive
from qkv.mechanisms.lookup.dot_product import DotProduct
from qkv.mechanisms.lookup.hard_lookup import Hard
from qkv.mechanisms.lookup.scaled_dot_product import ScaledDotProduct
from qkv.mechanisms.lookup.soft_lookup import Soft
from qkv.mechanisms.positions.alibi import ALiBi
from qkv.mechanisms.positions.relative_bias import RelativeBias
from qkv.mechanisms.positions.rotary import Rotary
from qkv.mechanisms.sparse.big_bird import BigBird
from qkv.mechanisms.sparse.longformer import Longformer
from qkv.mechanisms.sparse.sliding_window import SlidingWindow
from qkv.mechanisms.sparse.strided import Strided
from qkv.mechanisms.streaming.flash import Flash
from qkv.mechanisms.streaming.kv_cache_decoding import KVCacheDecoding
from qkv.mechanisms.streaming.ring import Ring

__all__ = ["MECHANISMS", "mechanism_class"]

_CLASSES: tuple[type[Mechanism], ...] = (
    DotProduct,
    ScaledDotProduct,
    Additive,
    Soft,
    Hard,
    Self,
    Causal,
    Cross,
    MultiHead,
    MultiQuery,
    GroupedQuery,
    MultiHeadLatent,
    RelativeBias,
    Rotary,
    ALiBi,
    SlidingWindow,
    Strided,
    Longformer,
    BigBird,
    Differential,
    Linear,
    Performer,
    Linformer,
    RWKV4,
    RWKV6,
    Mamba,
    Mamba2,
    GatedDelta,
    Flash,
    KVCacheDecoding,
    Ring,
)

MECHANISMS: dict[str, type[Mechanism]] = {cls.name: cls for cls in _CLASSES}
"""Command-line name to class, in the order in which tables show them."""


def mechanism_class(name: str) -> type[Mechanism]:
    """The class of a command-line name.

    Raises
    ------
    ArgumentError
        There is none of that name.
    """
    if name not in MECHANISMS:
        raise ArgumentError(
            f"there is no mechanism {shown(name)}.",
            [("mechanisms", ", ".join(MECHANISMS))],
            f"{did_you_mean(name, MECHANISMS)}Choose one of these.",
        )
    return MECHANISMS[name]
