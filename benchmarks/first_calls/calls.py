"""The calls, all of 8 heads over 64 keys of 64 numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CALLS", "COLUMNS", "Call"]

COLUMNS = ("import", "first", "second", "third", "another mask")
"""The last call is the first one with another mask, which allows the same pairs."""


@dataclass(frozen=True)
class Call:
    """A call of attention with a causal mask.

    Attributes
    ----------
    dtype : str
    q_len : int
        The last rows of the query that are asked for.
    backward : bool
        Whether gradients are computed after it.
    peers : tuple of str
        Modules of other libraries that can do it.
    """

    dtype: str = "float32"
    q_len: int = 64
    backward: bool = False
    peers: tuple[str, ...] = ("torch",)


CALLS = {
    "causal": Call(peers=("torch", "onnxruntime")),
    "decoding step": Call(q_len=1),
    "bfloat16": Call("bfloat16"),
    "gradients": Call(backward=True),
}
