"""A boolean array as a mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from qkv._dynamo import is_reading
from qkv.errors import ArgumentError
from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.problem.language.reading import signature_unless
from qkv.variants.base import FunctionText, ReadFunction, Role
from qkv.variants.captured import Condition
from qkv.variants.masks.algebra import MaskVariant


@dataclass(frozen=True, eq=False, repr=False)
class Mask(MaskVariant):
    """Allowed where the array is True. A bare boolean array means the same.

    Parameters
    ----------
    array : boolean array that broadcasts to (..., num_heads, q_len, kv_len), or function
        Read in place, by row. True = may attend, as in torch, JAX and Hugging Face's 4-D masks;
        the opposite of `nn.MultiheadAttention`'s. A function is `fn(batch, head, q_pos, kv_pos)`,
        written as one of `ScoreMod` is, and gives a condition: a mask_mod of FlexAttention.

    Raises
    ------
    ArgumentError
        If a function does not take four arguments, or gives no condition.
    DTypeError, ShapeError
        At the call, if the array is not boolean or does not broadcast to the scores.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((2, 4))
    >>> qkv.inspect(x, x, x, qkv.Mask([[True, False], [True, True]])).weights[...]
    array([[1. , 0. ],
           [0.5, 0.5]])
    """

    roles: ClassVar[Mapping[str, Role]] = {"array": "condition"}
    positions_only: ClassVar[bool] = True
    uses_batch_index: ClassVar[bool] = False
    dense_field: ClassVar[str | None] = "array"

    array: ArrayLike | Callable[..., Any]

    def __post_init__(self) -> None:
        if is_reading():
            return  # The call checks it.
        if callable(getattr(self.array, "mask_mod", None)):
            raise ArgumentError(
                f"Mask takes a boolean array or a function, not {type(self.array).__name__}.",
                action="Pass qkv.Mask(block_mask.mask_mod).",
            )
        if hasattr(self.array, "dtype") or not callable(self.array):
            return
        signature = signature_unless(self.array, 4)
        if signature is not None:
            is_mod = signature_unless(self.array, 5) is None
            raise ArgumentError(
                f"the mask takes {signature}, not four arguments.",
                action="Pass qkv.ScoreMod(fn) if fn(score, batch, head, q_pos, kv_pos) gives a "
                "score; a mask is fn(batch, head, q_pos, kv_pos)."
                if is_mod
                else "Write fn(batch, head, q_pos, kv_pos), whichever of them it uses.",
            )

    def with_functions(self, read: ReadFunction) -> Any:
        """See `qkv.variants.base.ReadFunction`."""
        if hasattr(self.array, "dtype") or not callable(self.array):
            return self
        text_and_arrays = read(self.array, ("batch", "head", "q_pos", "kv_pos"))
        return None if text_and_arrays is None else FunctionText(*text_and_arrays, is_mask=True)

    def __repr__(self) -> str:
        if hasattr(self.array, "dtype") or not callable(self.array):
            return super().__repr__()
        fn = getattr(self.array, "function", self.array)
        return f"Mask({getattr(fn, '__name__', type(fn).__name__)})"

    def lower(self, builder: Builder) -> None:
        if not callable(self.array):
            builder.mask(builder.dense_mask(self.array))
            return
        given = self.array
        expression, arrays = (given if isinstance(given, Condition) else Condition(given)).read()
        builder.mask(expression.on_tables(builder, arrays))

    def naive(self, dense: Dense) -> None:
        if callable(self.array):
            for i, row in enumerate(dense.allowed):
                row &= self.array(dense.batch, dense.head, int(dense.q_pos[i]), dense.kv_pos)
            return
        dense.allowed &= np.broadcast_to(dense.head_matrix(self.array), dense.allowed.shape)

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Mask]:
        full = rng.random(shape.scores) < 0.5
        empty_row = rng.random((shape.q_len, shape.kv_len)) < 0.7
        empty_row[: shape.q_len // 2] = False
        return (cls(full), cls(empty_row), cls(full[..., :1, :1, :]), cls(full[..., :1]))
