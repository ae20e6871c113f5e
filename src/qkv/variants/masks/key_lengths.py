"""Padded keys: the number of real ones in each batch row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from qkv.arguments.readable_checks import as_array
from qkv.errors import DTypeError, ShapeError
from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import Role
from qkv.variants.masks.algebra import MaskVariant


@dataclass(frozen=True, eq=False, repr=False)
class KeyLengths(MaskVariant):
    """Only the first `kv_lens[b]` key rows of batch row b are real.

    Parameters
    ----------
    kv_lens : int or integer array over the leading dimensions
        Between 0 and kv_len. With `q_offset="end"` the last query stands at the last real
        key, unless the variant is inside of `~` or `|`.

    Raises
    ------
    ShapeError
        If a length is negative or beyond kv_len, or the array does not fit the batch.
    DTypeError
        If the lengths are not integers.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((2, 1, 3, 4))
    >>> qkv.inspect(x, x, x, qkv.KeyLengths([1, 2])).weights[:, 0, 0]
    array([[1. , 0. , 0. ],
           [0.5, 0.5, 0. ]])
    """

    roles: ClassVar[Mapping[str, Role]] = {"kv_lens": "lengths"}
    positions_only: ClassVar[bool] = True
    uses_batch_index: ClassVar[bool] = False

    kv_lens: ArrayLike

    def lower(self, builder: Builder) -> None:
        lens = as_array("kv_lens", self.kv_lens)
        if lens.dtype.kind == "b":
            raise DTypeError(
                f"kv_lens is a boolean mask of shape {lens.shape}, not a number of keys for each "
                "batch row.",
                action="Pass qkv.KeyLengths(mask.sum(-1)) if the real keys come first, else "
                "mask[..., None, None, :] as a mask.",
            )
        if lens.dtype.kind not in "iu":
            raise DTypeError(
                f"kv_lens has dtype {lens.dtype}, not an integer type.",
                action="Pass kv_lens.astype(int).",
            )
        if lens.size and (lens.min() < 0 or lens.max() > builder.shape.kv_len):
            raise ShapeError(
                f"kv_lens runs from {lens.min()} to {lens.max()}; kv_len={builder.shape.kv_len}.",
                action="Give each batch row a number of keys from 0 to kv_len.",
            )
        builder.limit_keys(lens)
        # Steps take the table "kv_lens" as the numbers of keys of the whole call.
        label = "kv_lens of a part" if builder.is_part else "kv_lens"
        builder.mask(builder.kv_index < builder.per_batch(lens.astype(np.int64), label))

    def naive(self, dense: Dense) -> None:
        dense.allowed[:, int(dense.batch_entry(self.kv_lens)) :] = False

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[KeyLengths]:
        lens: Any = rng.integers(0, shape.kv_len + 1, shape.batch_shape)
        return (cls(lens), cls(shape.kv_len // 2))
