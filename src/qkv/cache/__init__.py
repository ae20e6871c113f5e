"""KV caches that own their storage and hand out what `qkv.attention` reads in place.

    cache = qkv.cache.PagedCache(page_size=16)
    rows = cache.append(key, value)
    out = rows.attention(query, qkv.Causal())

`ContiguousCache` keeps all tokens in one array that grows, `RollingCache` a window and the first
tokens, `PagedCache` pages that sequences share; each in the dtype in which rows come, or as int8.
Nothing is evicted from a paged cache: `truncate` drops the last tokens, and `allocator` takes the
page that was freed last first. To forget old tokens, use `RollingCache`.

protocol        what every cache does
consecutive     caches in consecutive rows: contiguous and rolling ones
pages           a cache in pages that sequences share
new_tokens      what `append` is given, checked and encoded
encoding        rows stored as they are, or as int8 with scales
memory          arrays of NumPy or torch, and the arithmetic of int8 and its scales
stored_rows     what a cache hands out: `Rows`, the arguments of `qkv.attention`
page_columns    variants over tokens, continued to the rows of pages
query_positions where the queries over a cache stand
arguments       lengths and indices, checked; summary: a cache in one line
"""

from qkv.cache.consecutive.contiguous import ContiguousCache
from qkv.cache.consecutive.rolling import RollingCache
from qkv.cache.encoding import quantize
from qkv.cache.pages.allocator import PageAllocator
from qkv.cache.pages.paged import PagedCache
from qkv.cache.protocol import Cache
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
