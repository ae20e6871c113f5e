"""The protocol of all caches."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, runtime_checkable

from qkv.cache.arguments import Lengths
from qkv.cache.stored_rows import Rows

__all__ = ["Cache"]

Self = TypeVar("Self", bound="Cache")


@runtime_checkable
class Cache(Protocol):
    """Keys and values of earlier tokens, at the end of which new ones are written.

    Every operation does all of what it says, or raises and leaves the cache as it was. Rows are
    kept as they are given: rotate keys before they are appended (`qkv.RoPE` as a variant of the
    call rotates keys at every step again, which gives the same result). For inference only: what
    torch or JAX would differentiate or trace is refused.

    Notes
    -----
    A token of one sequence takes `num_kv_heads * (head_dim + v_head_dim) * itemsize` bytes, or
    `num_kv_heads * (head_dim + v_head_dim + 8)` with `dtype="int8"`.

    Examples
    --------
    >>> import qkv.cache
    >>> isinstance(qkv.cache.PagedCache(), qkv.cache.Cache)
    True
    """

    @property
    def lengths(self) -> Lengths:
        """Tokens that each sequence has seen, an int64 array over the batch dimensions."""
        ...

    @property
    def q_offset(self) -> Any:
        """Position of the next token: an int, or an int64 array where sequences differ."""
        ...

    def read(self) -> Rows:
        """The stored rows, for queries at `q_offset` and later."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that keys and values take."""
        ...

    def append(self, key: Any, value: Any, new_lens: Any = None) -> Rows:
        """Write new tokens and hand out all rows that they may attend to.

        Parameters
        ----------
        key : array (..., num_kv_heads, new, head_dim)
        value : array (..., num_kv_heads, new, v_head_dim)
        new_lens : int or integer array over the batch dimensions, optional
            How many of the new tokens of each sequence are real, all unless given; the rows
            behind them are padding, and output rows of padding queries mean nothing.

        Returns
        -------
        Rows

        Raises
        ------
        ShapeError
            If lengths, heads or dimensions do not fit one another or those that came first, or
            there is no room.
        DTypeError, ArgumentError
            If library, type or device is another than that of those that came first.
        UnsupportedError
            If their library differentiates or traces them.
        """
        ...

    def truncate(self, lengths: Any) -> None:
        """Forget all tokens but the first `lengths` of each sequence.

        Parameters
        ----------
        lengths : int or integer array over the batch dimensions

        Raises
        ------
        ArgumentError
            If a length is negative, or more than there is.
        ShapeError, DTypeError
            If there is not one length for each sequence, or they are not integers.
        """
        ...

    def reorder(self, indices: Any) -> None:
        """Make sequence i of the batch what sequence `indices[i]` was, as beams need it.

        Parameters
        ----------
        indices : integer array (new batch)
            A sequence named twice is forked, one that is not named is dropped.

        Raises
        ------
        ArgumentError, ShapeError, DTypeError
            If there is no such sequence, or no batch dimension, or indices are not integers.
        """
        ...

    def fork(self: Self) -> Self:
        """Another cache with the same tokens; what happens to one does not change the other."""
        ...

    def reset(self) -> None:
        """Forget all tokens, and give their memory back; any shapes may come next."""
        ...

    def kv_extent(self, new: int) -> tuple[int, int]:
        """`(kv_len, kv_offset)` of the rows that `append` of `new` tokens would hand out.

        For sequences of one length; a framework builds its masks from it beforehand.
        """
        ...
