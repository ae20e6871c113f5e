"""A cache in one line: what it holds, and the memory that it takes."""

from __future__ import annotations

from qkv.cache.arguments import longest
from qkv.cache.protocol import Cache
from qkv.ledger import memory

__all__ = ["summary_of"]


def summary_of(cache: Cache) -> str:
    """The type, tokens and bytes of a cache, as its `repr`.

    Examples
    --------
    >>> import numpy as np, qkv.cache
    >>> cache = qkv.cache.ContiguousCache()
    >>> rows = np.ones((2, 1, 3, 4), np.float32)
    >>> _ = cache.append(rows, rows, [1, 3])
    >>> cache
    ContiguousCache(2 sequences of 1 to 3 tokens, 192 B)
    """
    lengths = cache.lengths
    most = longest(lengths)
    least = int(lengths.min(initial=most))
    tokens = f"{most}" if least == most else f"{least} to {most}"
    of = f"{lengths.size} sequences of " if lengths.size != 1 else ""
    unit = "token" if tokens == "1" else "tokens"
    return f"{type(cache).__name__}({of}{tokens} {unit}, {memory(cache.nbytes)})"
