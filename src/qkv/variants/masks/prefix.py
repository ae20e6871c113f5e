"""A prefix that every query sees."""

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
from qkv.variants.base import HOST_VALUES, Role
from qkv.variants.masks.algebra import MaskVariant


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(MaskVariant):
    """Keys with `kv_pos < length` are allowed; prefix-LM is `Causal() | Prefix(length)`.

    Parameters
    ----------
    length : int or integer array over the leading dimensions
        Number of positions in the prefix.

    Raises
    ------
    ArgumentError
        If a length is not a whole number of 0 or more.
    ShapeError
        At the call, if the array does not fit the batch.

    Notes
    -----
    Source: Raffel et al., "T5" (2020), section 3.2.1.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((3, 4))
    >>> qkv.inspect(x, x, x, qkv.Causal() | qkv.Prefix(2)).weights[0]
    array([0.5, 0.5, 0. ])
    """

    roles: ClassVar[Mapping[str, Role]] = {"length": "value"}
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True

    length: ArrayLike

    def __post_init__(self) -> None:
        if isinstance(self.length, HOST_VALUES) and not is_reading():
            self._lengths()

    def _lengths(self) -> NDArray[np.int64]:
        length = as_array("length", self.length)
        if length.dtype.kind not in "iu" or (length < 0).any():
            raise ArgumentError(
                f"Prefix length={shown(self.length)} is not a whole number of positions.",
                action="Pass an integer of 0 or more, or one for each batch row.",
            )
        # Any length above all positions allows all keys, so longer ones may be cut.
        return np.minimum(length.astype(np.uint64), 2 * INDEX_LIMIT).astype(np.int64)

    def lower(self, builder: Builder) -> None:
        builder.mask(builder.kv_pos < builder.per_batch(self._lengths(), "prefix length"))

    def naive(self, dense: Dense) -> None:
        dense.allowed[:, dense.kv_pos >= dense.batch_entry(self.length)] = False

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Prefix]:
        return (cls(min(3, shape.kv_len)), cls(rng.integers(0, 5, shape.batch_shape)))
