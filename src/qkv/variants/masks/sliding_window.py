"""Windows around the query's own position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qkv.arguments.declarations import is_integer, shown
from qkv.errors import ArgumentError
from qkv.problem.building.builder import INDEX_LIMIT, Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import UNSAID, Role
from qkv.variants.masks.algebra import MaskVariant

_BEYOND = 3 * INDEX_LIMIT
"""More than any two positions differ: each is an offset plus a row, all within INDEX_LIMIT."""


@dataclass(frozen=True, repr=False)
class SlidingWindow(MaskVariant):
    """A query attends to keys from `q_pos - left` to `q_pos + right`, both included.

    Parameters
    ----------
    left, right : int or None
        Keys before and after the query's own; None is unbounded. A Hugging Face window of W is
        `SlidingWindow(W - 1, 0)`.

    Raises
    ------
    ArgumentError
        If a side is negative or not an integer.

    Notes
    -----
    Work is proportional to `q_len * (left + right + 1)`. Source: Beltagy et al., "Longformer"
    (2020), section 3.1.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((4, 8))
    >>> qkv.inspect(x, x, x, qkv.SlidingWindow(1, 0)).weights[3]
    array([0. , 0. , 0.5, 0.5])
    """

    roles: ClassVar[Mapping[str, Role]] = {"left": "static", "right": "static"}
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True

    left: int | None
    right: int | None = UNSAID

    def __post_init__(self) -> None:
        if self.right is UNSAID:
            left = shown(self.left)
            raise ArgumentError(
                f"SlidingWindow({left}) says one side of the window.",
                action=f"Write SlidingWindow({left}, 0) for the query and keys before it, "
                f"or SlidingWindow({left}, {left}) for both sides. A window of W in "
                "transformers is SlidingWindow(W - 1, 0).",
            )
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is None:
                continue
            if not is_integer(value) or value < 0:
                raise ArgumentError(
                    f"SlidingWindow {name}={shown(value)} is not a whole number of keys.",
                    action="Pass an integer of 0 or more, or None for no bound.",
                )

    def lower(self, builder: Builder) -> None:
        distance = builder.q_pos - builder.kv_pos
        sides = ("left", self.left, distance), ("right", self.right, -distance)
        bounds = [
            (name, int(width), ahead)
            for name, width, ahead in sides
            if width is not None and width < _BEYOND
        ]
        for name, width, ahead in bounds:
            builder.mask(ahead <= builder.scalar(width, name))
        if not bounds:
            builder.mask(True)

    def naive(self, dense: Dense) -> None:
        for i, q_pos in enumerate(dense.q_pos):
            for j, kv_pos in enumerate(dense.kv_pos):
                if self.left is not None and kv_pos < q_pos - self.left:
                    dense.allowed[i, j] = False
                if self.right is not None and kv_pos > q_pos + self.right:
                    dense.allowed[i, j] = False

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[SlidingWindow]:
        return (cls(2, 0), cls(None, 3), cls(1, 2), cls(40, 0))
