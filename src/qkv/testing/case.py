"""A case: a shape, its variants, and the memory layout of its arrays.

Its values follow from its name, so that it means the same on every machine and in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeAlias, get_args
from zlib import crc32

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.errors import ArgumentError
from qkv.problem.building.builder import Shape
from qkv.testing.oracle import Truth, truth
from qkv.testing.tolerances import ORDERS, Bounds, bounds

Array = NDArray[Any]
Variants: TypeAlias = Callable[[Shape, np.random.Generator], Sequence[Any]]
Memory: TypeAlias = Literal[
    "contiguous", "strided", "reversed", "transposed", "broadcast", "repeated", "read-only",
    "unaligned",
]  # fmt: skip

__all__ = ["DTYPES", "Case", "Inputs", "Memory", "lay_out"]

DTYPES: Mapping[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def no_variants(shape: Shape, rng: np.random.Generator) -> Sequence[Any]:
    """Plain attention."""
    return ()


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of one call, `qkv.attention(*arrays, *variants, **keywords)`.

    Attributes
    ----------
    query, key, value : array
        As the case lays them out.
    variants : tuple
    keywords : mapping
        scale, q_offset, kv_offset and layout.

    Examples
    --------
    >>> from qkv.testing import cases
    >>> inputs = next(iter(cases())).build("float32")
    >>> inputs.query.dtype
    dtype('float32')
    """

    query: Array
    key: Array
    value: Array
    variants: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Query, key and value."""
        return self.query, self.key, self.value


@dataclass(frozen=True, eq=False)
class Case:
    """One problem that a backend either refuses or gets right.

    Attributes
    ----------
    name : str
        Unique; the random values follow from it.
    shape : Shape
        Sizes of the whole problem.
    variants : callable (shape, rng) -> sequence
        The variants of the call.
    scale, q_offset, kv_offset, layout
        As in `qkv.attention`.
    query_batch, kv_batch : tuple, optional
        Leading dimensions of the arrays where they only broadcast to those of `shape`.
    head_axis : bool
        False for two-dimensional arrays.
    memory : str
        How query, key and value lie in memory; see `lay_out`.
    magnitude : float
        Standard deviation of query and key.
    dtypes : tuple of str
        Names of `DTYPES`.

    Examples
    --------
    >>> import qkv
    >>> from qkv.testing import cases
    >>> case = next(iter(cases()))
    >>> inputs = case.build("float64")
    >>> out = qkv.attention(*inputs.arrays, *inputs.variants, **inputs.keywords)
    >>> out.shape == case.truth("float64").out.shape
    True
    """

    name: str
    shape: Shape
    variants: Variants = no_variants
    scale: float | None = None
    q_offset: Any = None
    kv_offset: Any = 0
    layout: Literal["bhld", "blhd"] = "bhld"
    query_batch: tuple[int, ...] | None = None
    kv_batch: tuple[int, ...] | None = None
    head_axis: bool = True
    memory: Memory = "contiguous"
    magnitude: float = 1.0
    dtypes: tuple[str, ...] = field(default=tuple(DTYPES))
    orders: ClassVar[tuple[int, ...]] = (1, ORDERS)
    """The numbers of summation orders for which bounds are computed, one after the other."""

    def __repr__(self) -> str:
        return f"Case({self.name!r})"

    def build(self, dtype: str) -> Inputs:
        """The arguments of `qkv.attention`, with query, key and value of `dtype`."""
        rng = np.random.default_rng(crc32(self.name.encode()))
        s = self.shape
        q_batch = s.batch_shape if self.query_batch is None else self.query_batch
        kv_batch = s.batch_shape if self.kv_batch is None else self.kv_batch
        query = self.magnitude * rng.normal(size=(*q_batch, s.num_heads, s.q_len, s.head_dim))
        key = self.magnitude * rng.normal(size=(*kv_batch, s.num_kv_heads, s.kv_len, s.head_dim))
        value = rng.normal(size=(*kv_batch, s.num_kv_heads, s.kv_len, s.v_head_dim))
        return Inputs(
            self.arrange(query.astype(DTYPES[dtype]), "query"),
            self.arrange(key.astype(DTYPES[dtype]), "key"),
            self.arrange(value.astype(DTYPES[dtype]), "value"),
            variants=tuple(self.variants(s, rng)),
            keywords={
                "scale": self.scale,
                "q_offset": self.q_offset,
                "kv_offset": self.kv_offset,
                "layout": self.layout,
            },
        )

    def arrange(self, array: Array, role: str = "out") -> Array:
        """An array `(..., heads, length, dim)` as the case passes it."""
        if not self.head_axis:
            array = array[0]
        elif self.layout == "blhd":
            array = array.swapaxes(-3, -2)
        return self.place(array, role)

    def place(self, array: Array, role: str) -> Array:
        """The array where the case has it in memory; `role` says which one it is."""
        return lay_out(array, self.memory)

    def plain_order(self, array: Array) -> Array:
        """An array of the call as `(..., heads, length, dim)`, whatever the layout."""
        if not self.head_axis:
            return array[None]
        return array.swapaxes(-3, -2) if self.layout == "blhd" else array

    @lru_cache(maxsize=8)  # noqa: B019 - cases live as long as the program
    def truth(self, dtype: str) -> Truth:
        """The answer for inputs rounded to `dtype`, in the order `(..., heads, length, dim)`."""
        inputs = self.build(dtype)
        query, key, value = map(self.plain_order, inputs.arrays)
        return truth(
            query,
            key,
            value,
            inputs.variants,
            scale=self.scale,
            q_offset=self.q_offset,
            kv_offset=self.kv_offset,
        )

    @lru_cache(maxsize=8)  # noqa: B019 - as above
    def bounds(self, dtype: str, orders: int = ORDERS) -> Bounds:
        """How far from `truth` a result may lie."""
        return bounds(self.truth(dtype), dtype, orders)


def lay_out(array: Array, memory: Memory) -> Array:
    """The same values another way in memory.

    "strided" takes every other element of a larger array of NaN, "reversed" has negative strides,
    "transposed" has its last two axes swapped, "broadcast" repeats the first matrix with stride 0
    along the leading axes and "repeated" the first row along the length (these two change the
    values), "unaligned" starts one byte off.

    Raises
    ------
    ArgumentError
        If `memory` is none of these, "contiguous" or "read-only".

    Examples
    --------
    >>> import numpy as np
    >>> lay_out(np.zeros((2, 3)), "transposed").strides
    (8, 16)
    """
    if memory not in get_args(Memory):
        raise ArgumentError(
            f"memory={shown(memory)} is not known.",
            [("known", ", ".join(get_args(Memory)))],
            "Use one of these.",
        )
    if memory == "strided":
        wide = np.full([2 * n + 1 for n in array.shape], np.nan, array.dtype)
        view = wide[(slice(1, None, 2),) * array.ndim]
        view[...] = array
        return view
    if memory == "reversed":
        return np.flip(np.ascontiguousarray(np.flip(array)))
    if memory == "transposed":
        return np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)
    if memory == "broadcast":
        return np.broadcast_to(array[(slice(0, 1),) * (array.ndim - 2)], array.shape)
    if memory == "repeated":
        return np.broadcast_to(array[..., :1, :], array.shape)
    if memory == "unaligned":
        shifted = np.frombuffer(bytearray(array.nbytes + 1), array.dtype, offset=1)
        view = shifted.reshape(array.shape)
        view[...] = array
        return view
    view = np.ascontiguousarray(array)
    view.setflags(write=memory != "read-only")
    return view
