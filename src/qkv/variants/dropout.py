"""Weights dropped by a counter-based generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from qkv._dynamo import is_reading
from qkv.arguments.declarations import shown
from qkv.arguments.readable_checks import is_truth_value
from qkv.errors import ArgumentError
from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import HOST_VALUES, UNSAID, Role, Variant


@dataclass(frozen=True, repr=False)
class Dropout(Variant):
    """Each weight is dropped with probability p, the others are divided by 1 - p.

    Parameters
    ----------
    p : float
        Probability, 0 <= p < 1.
    seed : int
        64-bit seed, or an array of one number. Whether a weight is dropped depends on the seed and
        on the flat batch index, query head, query row and key row alone: the same on every backend
        and tile size.

    Raises
    ------
    ArgumentError
        If p is not a probability below 1, or the seed not a whole number of 64 bits.

    Notes
    -----
    Word 0 of Philox4x32-10 with counter (key row, query row, head, batch) and key (low, high half
    of the seed); dropped where it is below `p * 2**32`. lse and statistics are those before
    dropout. Sources: Srivastava et al. (2014); Salmon et al., "Parallel Random Numbers: As Easy as
    1, 2, 3" (2011).

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.ones((4, 1))
    >>> qkv.attention(x, x, x, qkv.Dropout(0.5, seed=1))[:, 0]
    array([1.5, 2. , 2. , 1.5])
    """

    roles: ClassVar[Mapping[str, Role]] = {"p": "static", "seed": "value"}
    positions_only: ClassVar[bool] = True

    p: float
    seed: Any = UNSAID

    def __post_init__(self) -> None:
        if self.seed is UNSAID:
            raise ArgumentError(
                f"Dropout({shown(self.p)}) has no seed, which says which weights are dropped.",
                action=f"Write Dropout({shown(self.p)}, seed=0), with a new seed for each step.",
            )
        try:
            is_number = not (isinstance(self.p, str | bytes) or is_truth_value(self.p))
            fits = is_number and 0 <= float(self.p) < 1
        except (TypeError, ValueError, OverflowError, RuntimeError):
            fits = False
        if not fits:
            raise ArgumentError(
                f"Dropout p={shown(self.p)} is not a probability below 1.",
                action="Pass the share of weights to drop, as in Dropout(0.1, seed=0).",
            )
        if isinstance(self.seed, HOST_VALUES) and not is_reading():
            self._seed()

    def _seed(self) -> int:
        if type(self.seed) is int and 0 <= self.seed < 2**64:
            return self.seed  # Dynamo can trace this.
        given: Any = self.seed
        try:
            if np.size(given) == 1 and hasattr(given, "item"):
                given = given.item()
            seed = -1 if isinstance(given, bool | np.bool_) else int(given)
            fits = bool(seed == given) and 0 <= seed < 2**64
        except (TypeError, ValueError, OverflowError):
            seed, fits = -1, False
        if not fits:
            raise ArgumentError(
                f"Dropout seed={shown(self.seed)} is not a whole number of 64 bits.",
                action="Pass an integer from 0 to 2**64 - 1.",
            )
        return seed

    def lower(self, builder: Builder) -> None:
        builder.drop(float(self.p), self._seed())

    def naive(self, dense: Dense) -> None:
        for i in range(dense.factors.shape[0]):
            for j in range(dense.factors.shape[1]):
                word = _philox((j, i, dense.head, dense.batch), self._seed())
                dense.factors[i, j] *= 0.0 if word < self.p * 2**32 else 1 / (1 - self.p)

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Dropout]:
        return (cls(0.0, 0), cls(0.4, 1234567890123))


def _philox(counter: tuple[int, int, int, int], seed: int) -> int:
    """Word 0 of Philox4x32-10, one integer at a time, as printed in the paper."""
    x0, x1, x2, x3 = counter
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (
            (b >> 32) ^ x1 ^ k0,
            b & 0xFFFFFFFF,
            (a >> 32) ^ x3 ^ k1,
            a & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x0
