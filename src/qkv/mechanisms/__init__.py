"""The family of attention mechanisms, one class a file, on one example and one interface.

Every mechanism mixes tokens, `mechanism(x)`, shows its weights, `mechanism.token_mixing(x)`, its
calculation, `mechanism.explain(x)`, and its cost, `mechanism.cost(n)`. The same class takes NumPy
arrays, torch tensors (with gradients, on their device) and JAX arrays. `MECHANISMS` lists them.
All public names are imported from here; the files are in these folders:

    lookup       how a query is compared with keys: dot product, scaled, additive, soft, hard
    heads        where Q, K and V come from: self, causal, cross, multi-head, multi-query,
                 grouped-query, multi-head latent, differential
    positions    scores that depend on the distance: relative bias, rotary, ALiBi
    sparse       some of the pairs: sliding window, strided, Longformer, BigBird
    linear_time  time in proportion to n: linear, Performer, Linformer, RWKV, Mamba, gated delta
    streaming    full attention in another order: flash, decoding with a KV cache, ring
    base         what they share: base classes, arrays of any library, explanations, costs
"""

from qkv.mechanisms.base.example import example_input, example_tokens
from qkv.mechanisms.base.explanations.explanation import Explanation
from qkv.mechanisms.base.mechanism import Mechanism
from qkv.mechanisms.comparison import Comparison, compare
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
from qkv.mechanisms.registry import MECHANISMS
from qkv.mechanisms.sparse.big_bird import BigBird
from qkv.mechanisms.sparse.longformer import Longformer
from qkv.mechanisms.sparse.sliding_window import SlidingWindow
from qkv.mechanisms.sparse.strided import Strided
from qkv.mechanisms.streaming.flash import Flash
from qkv.mechanisms.streaming.kv_cache_decoding import KVCacheDecoding
from qkv.mechanisms.streaming.ring import Ring

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
