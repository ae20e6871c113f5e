"""The heads that each rank computes where ranks exchange rows for heads (Ulysses)."""

from __future__ import annotations

from qkv.errors import UnsupportedError

__all__ = ["heads_of", "kv_heads_of"]

_ALONG_ROWS = 'Use strategy="ring" or "gather" along one dimension of the ranks'


def heads_of(num_heads: int, ranks: int, rank: int) -> range:
    """The query heads that a rank computes.

    Raises
    ------
    UnsupportedError
        If the heads cannot be shared out evenly.
    """
    if num_heads % ranks:
        raise UnsupportedError(
            f"{num_heads} query heads cannot be shared out evenly to {ranks} ranks.",
            action=f"{_ALONG_ROWS}, or a number of ranks that divides the heads.",
        )
    each = num_heads // ranks
    return range(rank * each, (rank + 1) * each)


def kv_heads_of(num_heads: int, num_kv_heads: int, ranks: int, rank: int) -> range:
    """The key heads that the query heads of a rank read; several ranks may have one alike.

    Raises
    ------
    UnsupportedError
        If a rank's query heads would read a part of one group and a part of another.
    """
    heads = heads_of(num_heads, ranks, rank)
    group = num_heads // num_kv_heads
    if num_kv_heads % ranks and ranks % num_kv_heads:
        raise UnsupportedError(
            f"{num_kv_heads} key heads can neither be shared out evenly to {ranks} ranks nor be "
            "held alike by as many ranks each.",
            action=f"{_ALONG_ROWS}.",
        )
    return range(heads.start // group, (heads.stop - 1) // group + 1)
