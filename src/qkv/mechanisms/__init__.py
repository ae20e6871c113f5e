"""The family of attention mechanisms, one class a file, on one example and one interface.

Every mechanism mixes tokens, `mechanism(x)`, shows its weights, `mechanism.token_mixing(x)`, its
calculation, `mechanism.explain(x)`, and its cost, `mechanism.cost(n)`. The same class takes NumPy
arrays, torch tensors (with gradients, on their device) and JAX arrays. `MECHANISMS` lists them.
"""

from qkv.mechanisms.additive import Additive
from qkv.mechanisms.alibi import ALiBi
from qkv.mechanisms.base import Mechanism
from qkv.mechanisms.big_bird import BigBird
from qkv.mechanisms.causal import Causal
from qkv.mechanisms.comparison import Comparison, compare
from qkv.mechanisms.cross import Cross
from qkv.mechanisms.differential import Differential
from qkv.mechanisms.dot_product import DotProduct
from qkv.mechanisms.example import example_input, example_tokens
from qkv.mechanisms.explanation import Explanation
from qkv.mechanisms.flash import Flash
from qkv.mechanisms.gated_delta import GatedDelta
from qkv.mechanisms.grouped_query import GroupedQuery
from qkv.mechanisms.hard_lookup import Hard
from qkv.mechanisms.kv_cache_decoding import KVCacheDecoding
from qkv.mechanisms.linear import Linear
from qkv.mechanisms.linformer import Linformer
from qkv.mechanisms.longformer import Longformer
from qkv.mechanisms.mamba import Mamba
from qkv.mechanisms.mamba2 import Mamba2
from qkv.mechanisms.multi_head import MultiHead
from qkv.mechanisms.multi_head_latent import MultiHeadLatent
from qkv.mechanisms.multi_query import MultiQuery
from qkv.mechanisms.performer import Performer
from qkv.mechanisms.registry import MECHANISMS
from qkv.mechanisms.relative_bias import RelativeBias
from qkv.mechanisms.ring import Ring
from qkv.mechanisms.rotary import Rotary
from qkv.mechanisms.rwkv4 import RWKV4
from qkv.mechanisms.rwkv6 import RWKV6
from qkv.mechanisms.scaled_dot_product import ScaledDotProduct
from qkv.mechanisms.self_attention import Self
from qkv.mechanisms.sliding_window import SlidingWindow
from qkv.mechanisms.soft_lookup import Soft
from qkv.mechanisms.strided import Strided

__all__ = [
    "MECHANISMS",
    "RWKV4",
    "RWKV6",
    "ALiBi",
    "Additive",
    "BigBird",
    "Causal",
    "Comparison",
    "Cross",
    "Differential",
    "DotProduct",
    "Explanation",
    "Flash",
    "GatedDelta",
    "GroupedQuery",
    "Hard",
    "KVCacheDecoding",
    "Linear",
    "Linformer",
    "Longformer",
    "Mamba",
    "Mamba2",
    "Mechanism",
    "MultiHead",
    "MultiHeadLatent",
    "MultiQuery",
    "Performer",
    "RelativeBias",
    "Ring",
    "Rotary",
    "ScaledDotProduct",
    "Self",
    "SlidingWindow",
    "Soft",
    "Strided",
    "compare",
    "example_input",
    "example_tokens",
]
