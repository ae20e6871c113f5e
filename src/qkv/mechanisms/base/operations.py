"""Ledgers of what mechanisms are made of: projections, normalisation, traffic."""

from __future__ import annotations

from qkv.arguments.declarations import checked, shown
from qkv.errors import DTypeError
from qkv.ledger import Count, Ledger, matmul, step

__all__ = ["item_bytes", "norm_of_rows", "projection", "traffic"]

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one number of each floating type."""


def projection(name: str, rows: int, inner: int, outer: int, bias: bool = False) -> Ledger:
    """`x W^T + b` of `rows` rows, with its parameters.

    Parameters
    ----------
    name : str
    rows, inner, outer : int
        Rows of x, and the lengths of a row before and after.
    bias : bool

    Examples
    --------
    >>> int(projection("q_proj", rows=5, inner=8, outer=4).parameters)
    32
    """
    product = matmul(name, rows, inner, outer) + Ledger(parameters=Count(1) * inner * outer)
    if bias:
        product += step(name, add=rows * outer) + Ledger(parameters=Count(1) * outer)
    return product


def norm_of_rows(name: str, rows: int, width: int) -> Ledger:
    """RMSNorm of `rows` rows of `width` numbers, with the weight that all of them share.

    Examples
    --------
    >>> int(norm_of_rows("norm", rows=5, width=8).parameters)
    8
    """
    numbers = rows * width
    return step(name, multiply=2 * numbers, add=numbers, sqrt=rows, divide=numbers + rows) + Ledger(
        parameters=Count(1) * width
    )


def traffic(read: int, written: int, dtype: str) -> Ledger:
    """The bytes of `read` and `written` numbers: inputs and weights once, the output once.

    Raises
    ------
    DTypeError
        `dtype` is not a floating type.
    """
    size = item_bytes(dtype)
    return Ledger(bytes_read=Count(1) * read * size, bytes_written=Count(1) * written * size)


@checked
def item_bytes(dtype: str) -> int:
    """Bytes of one number.

    Raises
    ------
    DTypeError
        `dtype` is not a floating type.

    Examples
    --------
    >>> item_bytes("bfloat16")
    2
    """
    if dtype not in _BYTES:
        raise DTypeError(
            f"dtype={shown(dtype)} is not a floating type.",
            action=f"Pass one of {', '.join(_BYTES)}.",
        )
    return _BYTES[dtype]
