"""Counts of scalar operations, parameters and bytes, each with its closed form in symbols."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qkv.arguments.declarations import checked, shown
from qkv.count import Amount, Count, symbols
from qkv.errors import ArgumentError

__all__ = [
    "KINDS", "Count", "Ledger", "attended_pairs", "attention_ledger", "attention_operations",
    "ledger", "matmul", "memory", "score_entries", "softmax", "step", "symbols",
]  # fmt: skip

KINDS = (
    "multiply", "add", "subtract", "divide", "compare", "exp", "log", "sqrt", "tanh", "sin", "cos",
)  # fmt: skip
"""Every kind of scalar operation that a ledger counts."""

_ZERO = Count(0)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Scalar operations by step and kind, with parameters and bytes.

    Ledgers add up with `+` and `sum`; `ledger * count` is that of `count` heads, rows or layers.

    Attributes
    ----------
    operations : dict of (step, kind) to Count
        Scalar operations; `ledger["qk_multiply"]` reads that of step `qk` and kind `multiply`.
    space : dict of step to Count
        Numbers that a step leaves in memory for later steps.
    parameters : Count
        Learned numbers.
    bytes_read, bytes_written : Count
        What has to move between memory and the processor at least.

    Raises
    ------
    ArgumentError
        If an operation is not one of `KINDS`.

    Examples
    --------
    >>> from qkv.ledger import matmul, symbols
    >>> n, d, h = symbols(n=5, d=4, h=2)
    >>> heads = matmul("qk", n, d, n) * h
    >>> int(heads["qk_multiply"]), heads.total.formula
    (200, '2 n^2 d h - n^2 h')
    """

    operations: dict[tuple[str, str], Count] = field(default_factory=dict)
    space: dict[str, Count] = field(default_factory=dict)
    parameters: Count = _ZERO
    bytes_read: Count = _ZERO
    bytes_written: Count = _ZERO

    def __post_init__(self) -> None:
        if not (isinstance(self.operations, Mapping) and isinstance(self.space, Mapping)):
            raise ArgumentError("operations and space are dicts.", action="Pass dicts of counts.")
        for place in self.operations:
            kind: Any = place[1] if isinstance(place, tuple) and len(place) == 2 else None
            if not isinstance(kind, str) or kind not in KINDS:
                raise ArgumentError(
                    f"{shown(kind)} is not a kind of operation.",
                    [("kinds", ", ".join(KINDS))],
                    "Count it as one of these.",
                )
        for name in ("parameters", "bytes_read", "bytes_written"):
            object.__setattr__(self, name, as_count(getattr(self, name)))
        for name in ("operations", "space"):
            counts = {key: as_count(value) for key, value in getattr(self, name).items()}
            object.__setattr__(self, name, counts)

    @property
    def counts(self) -> dict[str, Count]:
        """Operations by `step_kind`, in the order in which they are done."""
        return {f"{name}_{kind}": count for (name, kind), count in self.operations.items()}

    @property
    def formulas(self) -> dict[str, str]:
        """The closed form of each of `counts`."""
        return {name: count.formula for name, count in self.counts.items()}

    def __getitem__(self, name: str) -> Count:
        try:
            return self.counts[name]
        except KeyError:
            raise ArgumentError(
                f"{shown(name)} is not counted here.",
                [("counted", ", ".join(self.counts))],
                "Name a step and a kind, as in 'qk_multiply'.",
            ) from None

    @property
    def total(self) -> Count:
        """All operations, whatever their kind."""
        return _sum(self.operations.values())

    @property
    def kinds(self) -> dict[str, Count]:
        """Operations by kind, over all steps."""
        return {
            kind: _sum(count for (_, k), count in self.operations.items() if k == kind)
            for kind in KINDS
            if any(k == kind for _, k in self.operations)
        }

    @property
    def steps(self) -> dict[str, Count]:
        """Operations by step, over all kinds."""
        return {
            name: _sum(count for (s, _), count in self.operations.items() if s == name)
            for name in dict.fromkeys(s for s, _ in self.operations)
        }

    @property
    def bytes_moved(self) -> Count:
        """Bytes read and written."""
        return _sum((self.bytes_read, self.bytes_written))

    def __add__(self, other: Any) -> Ledger:
        if not isinstance(other, Ledger):
            return self if other == 0 else NotImplemented
        return Ledger(
            _merged(self.operations, other.operations),
            _merged(self.space, other.space),
            _sum((self.parameters, other.parameters)),
            _sum((self.bytes_read, other.bytes_read)),
            _sum((self.bytes_written, other.bytes_written)),
        )

    __radd__ = __add__

    def __mul__(self, count: int) -> Ledger:
        if not isinstance(count, int):
            return NotImplemented
        return Ledger(
            {key: value * count for key, value in self.operations.items()},
            {key: value * count for key, value in self.space.items()},
            self.parameters * count,
            self.bytes_read * count,
            self.bytes_written * count,
        )

    __rmul__ = __mul__


def as_count(value: int) -> Count:
    """A number as a count; one that is a count already keeps its symbols."""
    return value if isinstance(value, Count) else Count(value)


def _sum(counts: Iterable[Count]) -> Count:
    return sum(counts, start=_ZERO)


def _merged(a: dict[Any, Count], b: dict[Any, Count]) -> dict[Any, Count]:
    return {key: a.get(key, _ZERO) + b.get(key, _ZERO) for key in {**a, **b}}


@checked
def step(name: str, *, space: Amount = 0, **operations: Amount) -> Ledger:
    """The ledger of one step.

    Parameters
    ----------
    name : str
        What the step is called.
    space : int
        Numbers that it leaves in memory for later steps.
    **operations : int
        How many of each kind of `KINDS`; counts keep their symbols.

    Raises
    ------
    ArgumentError
        If a keyword is not a kind of operation.

    Examples
    --------
    >>> (n,) = symbols(n=3)
    >>> step("scale", divide=n * n, space=n * n).total.formula
    'n^2'
    """
    counts = {(name, kind): as_count(count) for kind, count in operations.items()}
    return Ledger(counts, {name: as_count(space)} if space else {})


@checked
def matmul(name: str, rows: Amount, inner: Amount, columns: Amount) -> Ledger:
    """A matrix product `(rows, inner) @ (inner, columns)`.

    A sum of n numbers takes n - 1 additions.

    Parameters
    ----------
    name : str
        What the step is called.
    rows, inner, columns : int
        Sizes; counts keep their symbols.

    Examples
    --------
    >>> matmul("qk", *symbols(n=3, d=3, m=3)).total.formula
    '2 n m d - n m'
    """
    additions = rows * max(inner - 1, 0) * columns
    return step(name, multiply=rows * inner * columns, add=additions, space=rows * columns)


@checked
def softmax(name: str, rows: Amount, columns: Amount) -> Ledger:
    """Softmax of every row: `exp(s - max) / sum exp(s - max)`.

    A maximum of n numbers takes n - 1 comparisons, their sum n - 1 additions.

    Parameters
    ----------
    name : str
        What the step is called.
    rows, columns : int
        Sizes; counts keep their symbols.

    Examples
    --------
    >>> softmax("softmax", *symbols(n=3, m=3)).kinds["exp"].formula
    'n m'
    """
    pairs, joins = rows * columns, rows * max(columns - 1, 0)
    return step(
        name, compare=joins, subtract=pairs, exp=pairs, add=joins, divide=pairs, space=pairs
    )


@checked
def attended_pairs(
    q_len: Amount, kv_len: Amount, *, causal: bool = False, left: Amount | None = None
) -> int:
    """Pairs of a query and a key that it may attend to; queries are the last of the keys.

    Parameters
    ----------
    q_len, kv_len : int
        Rows of query and key; q_len at most kv_len, if masked. Counts keep their symbols.
    causal : bool
        A query sees no later key; else a window reaches as far to the right as to the left.
    left : int, optional
        Keys before its own that a query sees, as in `qkv.SlidingWindow`; all by default.

    Raises
    ------
    ArgumentError
        There are more queries than keys, and a mask or a window.

    Examples
    --------
    >>> (n,) = symbols(n=5)
    >>> attended_pairs(n, n, causal=True).formula
    'n^2 / 2 + n / 2'
    >>> int(attended_pairs(1000, 1000, causal=True, left=127))
    119872
    """
    if not causal and left is None:
        return q_len * kv_len
    if q_len > kv_len:
        raise ArgumentError(f"q_len={q_len} > kv_len={kv_len}.", action="Pass q_len <= kv_len.")
    if not causal:
        later = attended_pairs(q_len, q_len, causal=True, left=left) - q_len
        return attended_pairs(q_len, kv_len, causal=True, left=left) + later
    first = kv_len - q_len + 1
    if left is None or left + 1 >= kv_len:
        return q_len * first + q_len * (q_len - 1) // 2
    width = left + 1
    if first >= width:
        return q_len * width
    fewer = width - first
    return fewer * first + fewer * (fewer - 1) // 2 + (q_len - fewer) * width


@checked
def attention_ledger(
    pairs: Amount, rows: Amount, head_dim: Amount, v_head_dim: Amount, *, scaled: bool = True
) -> Ledger:
    """Scalar operations of attention that computes only some pairs.

    Parameters
    ----------
    pairs : int
        Pairs of a query and a key that are computed.
    rows : int
        Query rows that have a key.
    head_dim, v_head_dim : int
        Length of a key row, and of a value row.
    scaled : bool
        Whether scores are divided by sqrt(head_dim).

    Examples
    --------
    >>> from qkv.ledger import attended_pairs, attention_ledger
    >>> int(attention_ledger(attended_pairs(5, 5, causal=True), 5, 4, 4).total)
    285
    """
    joins, d_v = pairs - rows, v_head_dim
    scores = step("qk", multiply=pairs * head_dim, add=pairs * max(head_dim - 1, 0), space=pairs)
    weights = step(
        "softmax", compare=joins, subtract=pairs, exp=pairs, add=joins, divide=pairs, space=pairs
    )
    output = step("av", multiply=pairs * d_v, add=joins * d_v, space=rows * d_v)
    if scaled:
        scores += step("scale", divide=pairs, space=pairs)
    return scores + weights + output


@checked
def ledger(q_len: Amount, kv_len: Amount, head_dim: Amount, v_head_dim: Amount) -> Ledger:
    """Every scalar operation of `softmax(Q K^T / sqrt(head_dim)) V` done by hand.

    Parameters
    ----------
    q_len, kv_len : int
        Rows of query, and of key and value; n and m in formulas, unless they have names.
    head_dim, v_head_dim : int
        Length of a key row, and of a value row; d and d_v in formulas.

    Returns
    -------
    Ledger
        Of one head of one batch row.

    Examples
    --------
    >>> from qkv.ledger import ledger, symbols
    >>> int(ledger(5, 5, 4, 4).total)
    495
    >>> n, d = symbols(n=3, d=3)
    >>> ledger(n, n, d, d).total.formula
    '4 n^2 d + 5 n^2 - n d - 2 n'
    """
    given = {"n": q_len, "m": kv_len, "d": head_dim, "d_v": v_head_dim}
    n, m, d, d_v = (
        size if isinstance(size, Count) else Count(size, name) for name, size in given.items()
    )
    return attention_ledger(n * m, n if m else 0, d, d_v)


@checked
def attention_operations(pairs: Amount, head_dim: Amount, v_head_dim: Amount) -> int:
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
    >>> attention_operations(1000 * 1000, 512, 512)
    2048000000
    """
    return 2 * pairs * (head_dim + v_head_dim)


@checked
def score_entries(
    q_len: Amount, kv_len: Amount, *, num_heads: Amount = 1, num_layers: Amount = 1
) -> int:
    """Entries of all score matrices; times the bytes of an entry, what holding them would take.

    Examples
    --------
    >>> score_entries(2048, 2048, num_heads=96, num_layers=96)
    38654705664
    """
    return q_len * kv_len * num_heads * num_layers


@checked
def memory(size: Amount) -> str:
    """A number of bytes to read: B, KiB, MiB, GiB, TiB or PiB.

    Examples
    --------
    >>> memory(65_536**2 * 4)
    '16.0 GiB'
    """
    for power, unit in ((5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.1f} {unit}"
    return f"{size} B"
