"""Attention with linear biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv.arguments.declarations import is_integer
from qkv.errors import ArgumentError
from qkv.problem.building.builder import Builder, Shape, real_numbers
from qkv.problem.dense import Dense
from qkv.variants.base import Role, Variant


@dataclass(frozen=True, eq=False, repr=False)
class ALiBi(Variant):
    """`score - slope[head] * abs(q_pos - kv_pos)`.

    Parameters
    ----------
    slopes : float or array (num_heads,), optional
        Slope of each query head; by default the paper's geometric sequence.

    Raises
    ------
    ArgumentError
        If `slopes` is an integer, which other libraries take as the number of heads.

    Notes
    -----
    For n heads, a power of two, slope i is `2 ** (-8 * (i + 1) / n)`; otherwise the slopes of the
    power of two below, then every other one of the power above. Source: Press et al., "Train
    Short, Test Long" (2022), section 3 and the published code.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((1, 2, 4))
    >>> qkv.inspect(x, x, x, qkv.ALiBi(1.0)).weights[0, 0].round(3)
    array([0.731, 0.269])
    """

    roles: ClassVar[Mapping[str, Role]] = {"slopes": "value"}
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True

    slopes: ArrayLike | None = None

    def __post_init__(self) -> None:
        if is_integer(self.slopes):
            raise _may_be_heads(self.slopes)

    def lower(self, builder: Builder) -> None:
        slopes = self._slopes(builder.shape.num_heads)
        slope = builder.per_head(slopes, "slopes")
        builder.mod(builder.score - slope * abs(builder.q_pos - builder.kv_pos))

    def naive(self, dense: Dense) -> None:
        slopes = np.broadcast_to(self._slopes(dense.num_heads), (dense.num_heads,))
        dense.scores = dense.scores - float(slopes[dense.head]) * np.abs(dense.distance)

    def _slopes(self, num_heads: int) -> NDArray[Any]:
        if self.slopes is None:
            return alibi_slopes(num_heads)
        numbers = real_numbers(self.slopes, "slopes")
        if numbers.ndim == 0 and np.asarray(self.slopes).dtype.kind in "iu":
            raise _may_be_heads(self.slopes)
        return numbers

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[ALiBi]:
        return (cls(), cls(0.5), cls(rng.random(shape.num_heads)))


def alibi_slopes(num_heads: int) -> NDArray[np.float64]:
    """The slopes of the paper for `num_heads` heads."""
    if num_heads == 0:
        return np.zeros(0)
    below = 2 ** (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 * np.arange(1, below + 1) / below)
    more = 2.0 ** (-8.0 * np.arange(1, 2 * below + 1, 2) / (2 * below))
    return np.concatenate([slopes, more[: num_heads - below]])


def _may_be_heads(slopes: Any) -> ArgumentError:
    """The error for one integer, since other libraries take the number of heads here."""
    return ArgumentError(
        f"ALiBi slopes={slopes} is an integer, which may mean a number of heads.",
        action=f"Pass ALiBi() for the slopes of the paper, or {slopes}.0 as slope.",
    )
