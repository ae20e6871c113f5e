"""Soft look-up: a dictionary that answers with a mixture of its values."""

from __future__ import annotations

from qkv.arguments.declarations import Positive, Size
from qkv.mechanisms.base.unprojected import UnprojectedAttention

__all__ = ["Soft"]


class Soft(UnprojectedAttention):
    """`softmax(Q K^T / temperature) V`: every key answers, the better the match the louder.

    As the temperature falls to 0, the answer becomes that of a hard look-up (`Hard`). Unlike that
    one it has a gradient with respect to queries and keys, so that both can be learned.

    Parameters
    ----------
    head_dim : int
        Length of query and key rows.
    temperature : float
        What scores are divided by, `sqrt(head_dim)` unless given.

    Raises
    ------
    ArgumentError
        The temperature is not above 0.

    Notes
    -----
    About `4 n**2 head_dim` operations, no parameters. Source: Graves et al., "Neural Turing
    Machines" (2014), section 3.3.1, content-based addressing, which compares by the cosine of both
    rows.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Soft
    >>> Soft(2, temperature=0.1).token_mixing(np.eye(2)).round(3)
    array([[1., 0.],
           [0., 1.]])
    """

    name = "soft"
    paper = "Graves et al., Neural Turing Machines (2014), section 3.3.1"
    formula = "softmax(Q K^T / temperature) V"

    def __init__(self, head_dim: Size, temperature: Positive | None = None) -> None:
        super().__init__(head_dim, scale=None if temperature is None else 1 / temperature)
