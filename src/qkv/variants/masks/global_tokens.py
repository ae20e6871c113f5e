"""Global tokens, which attend to all positions and are attended to by all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv._dynamo import is_reading
from qkv.arguments.declarations import shown
from qkv.arguments.readable_checks import as_array
from qkv.errors import ArgumentError
from qkv.problem.building.builder import INDEX_LIMIT, Builder, Shape
from qkv.problem.dense import Dense
from qkv.problem.language.symbols import Expr
from qkv.variants.base import HOST_VALUES, Role
from qkv.variants.masks.algebra import MaskVariant


@dataclass(frozen=True, eq=False, repr=False)
class GlobalTokens(MaskVariant):
    """Allowed where the query or the key stands at one of `positions`.

    Longformer is `SlidingWindow(w, w) | GlobalTokens(positions)`.

    Parameters
    ----------
    positions : integer array (n,)
        Positions of the global tokens.

    Raises
    ------
    ArgumentError
        If positions are not a list of integers, or too far apart.

    Notes
    -----
    Source: Beltagy et al., "Longformer" (2020), section 3.1; Zaheer et al., "Big Bird" (2020).

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((4, 8))
    >>> longformer = qkv.SlidingWindow(0, 0) | qkv.GlobalTokens([1])
    >>> qkv.inspect(x, x, x, longformer).weights[...]
    array([[0.5 , 0.5 , 0.  , 0.  ],
           [0.25, 0.25, 0.25, 0.25],
           [0.  , 0.5 , 0.5 , 0.  ],
           [0.  , 0.5 , 0.  , 0.5 ]])
    """

    roles: ClassVar[Mapping[str, Role]] = {"positions": "value"}
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True

    positions: ArrayLike

    def __post_init__(self) -> None:
        if isinstance(self.positions, HOST_VALUES) and not is_reading():
            self._positions()

    def _positions(self) -> NDArray[np.int64]:
        positions = as_array("positions", self.positions)
        if positions.ndim != 1 or (positions.size and positions.dtype.kind not in "iu"):
            raise ArgumentError(
                f"GlobalTokens takes a list of positions, not {shown(self.positions)}.",
                action="Pass integers, as in GlobalTokens([0, 5]).",
            )
        low, high = (int(positions.min()), int(positions.max())) if positions.size else (0, 0)
        if low < -INDEX_LIMIT or high > INDEX_LIMIT or high - low > 2**27:
            raise ArgumentError(
                f"GlobalTokens spans {low} to {high}; "
                f"at most {2**27} positions may lie between the first and the last.",
                action="Use Mask or ScoreMod for tokens so far apart.",
            )
        return positions.astype(np.int64)

    def lower(self, builder: Builder) -> None:
        positions = self._positions()
        low = int(positions.min()) if positions.size else 0
        span = int(np.ptp(positions)) + 1 if positions.size else 1
        chosen = np.zeros(span + 2, bool)
        chosen[positions - low + 1] = True
        member = builder.table(chosen, "global tokens")
        first = builder.scalar(low - 1, "first global token")
        last = builder.scalar(span + 1, "global span")

        def is_global(position: Expr) -> Expr:
            return member.entry((position - first).clip(0, last))

        builder.mask(is_global(builder.q_pos) | is_global(builder.kv_pos))

    def naive(self, dense: Dense) -> None:
        chosen = {int(p) for p in np.asarray(self.positions)}
        for i, q_pos in enumerate(dense.q_pos):
            for j, kv_pos in enumerate(dense.kv_pos):
                if int(q_pos) not in chosen and int(kv_pos) not in chosen:
                    dense.allowed[i, j] = False

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[GlobalTokens]:
        return (cls([0]), cls([1, 4, 70]))
