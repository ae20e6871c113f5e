"""KV caches that own their storage and hand out what `qkv.attention` reads in place.

    cache = qkv.cache.PagedCache(page_size=16)
    rows = cache.append(key, value)
    out = rows.attention(query, qkv.Causal())

`ContiguousCache` keeps all tokens in one array that grows, `RollingCache` a window and the first
tokens, `PagedCache` pages that sequences share; each in the dtype in which rows come, or as int8.
Nothing is evicted from a paged cache: `truncate` drops the last tokens, and `allocator` takes the
page that was freed last first. To forget old tokens, use `RollingCache`.
"""

from qkv.cache.allocator import PageAllocator
from qkv.cache.contiguous import ContiguousCache
from qkv.cache.encoding import quantize
from qkv.cache.paged import PagedCache
from qkv.cache.protocol import Cache
from qkv.cache.rolling import RollingCache
from qkv.cache.stored_rows import Part, Rows

__all__ = [
    "Cache",
    "ContiguousCache",
    "PageAllocator",
    "PagedCache",
    "Part",
    "RollingCache",
    "Rows",
    "quantize",
]
