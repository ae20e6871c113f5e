"""What attention costs, counted from the definition."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Ledger", "attention_operations", "ledger", "memory", "score_entries"]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Scalar operations of one head, by step; `total` is their sum."""

    qk_multiply: int
    qk_add: int
    scale_divide: int
    softmax_compare: int
    softmax_subtract: int
    softmax_exp: int
    softmax_add: int
    softmax_divide: int
    av_multiply: int
    av_add: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def ledger(q_len: int, kv_len: int, head_dim: int, v_head_dim: int) -> Ledger:
    """Every scalar operation of `softmax(Q K^T / sqrt(head_dim)) V` done by hand.

    A sum of n numbers takes n - 1 additions, a maximum n - 1 comparisons.

    Parameters
    ----------
    q_len, kv_len : int
        Rows of query, and of key and value.
    head_dim, v_head_dim : int
        Length of a key row, and of a value row.

    Returns
    -------
    Ledger
        Of one head of one batch row.

    Examples
    --------
    >>> from qkv.cost import ledger
    >>> ledger(5, 5, 4, 4).total
    495
    """
    pairs = q_len * kv_len
    joins = q_len * max(kv_len - 1, 0)
    return Ledger(
        qk_multiply=pairs * head_dim,
        qk_add=pairs * max(head_dim - 1, 0),
        scale_divide=pairs,
        softmax_compare=joins,
        softmax_subtract=pairs,
        softmax_exp=pairs,
        softmax_add=joins,
        softmax_divide=pairs,
        av_multiply=pairs * v_head_dim,
        av_add=joins * v_head_dim,
    )


def attention_operations(pairs: int, head_dim: int, v_head_dim: int) -> int:
    """Operations of the two matrix products: `2 * pairs * (head_dim + v_head_dim)`.

    The usual count: one multiply-add is two operations, softmax is left out. Self-attention of n
    tokens with v_head_dim = head_dim = d takes `4 * n * n * d`; causal about half.

    Parameters
    ----------
    pairs : int
        Pairs of a query and a key that are computed, over all heads and batch rows.
    head_dim, v_head_dim : int
        Length of a key row, and of a value row.

    Examples
    --------
    >>> from qkv.cost import attention_operations
    >>> attention_operations(1000 * 1000, 512, 512)
    2048000000
    """
    return 2 * pairs * (head_dim + v_head_dim)


def score_entries(q_len: int, kv_len: int, *, num_heads: int = 1, num_layers: int = 1) -> int:
    """Entries of all score matrices; times the bytes of an entry, what holding them would take.

    Examples
    --------
    >>> from qkv.cost import score_entries
    >>> score_entries(2048, 2048, num_heads=96, num_layers=96)
    38654705664
    """
    return q_len * kv_len * num_heads * num_layers


def memory(size: int) -> str:
    """A number of bytes to read: B, KiB, MiB or GiB.

    Examples
    --------
    >>> memory(65_536**2 * 4)
    '16.0 GiB'
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.1f} {unit}"
    return f"{size} B"
