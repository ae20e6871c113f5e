"""Rows rounded to int8 as a compiled pass, as `qkv.cache.quantize` defines it:

    scales[..., j] = max(abs(rows[..., j, :])) / 127
    values[..., j, :] = round(rows[..., j, :] / scales[..., j])

for the keys and values of new tokens in one launch, keys less an offset. The scale of a row that is
not finite is not finite either, and its values mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.addresses import quick_address_of
from qkv.backends.cpu.compiler.compile import EmitFunction, Kernel, build
from qkv.backends.cpu.emit.argument_block import word_index
from qkv.backends.cpu.machine.host import Host, host
from qkv.backends.cpu.rows.layout import INT8_FIELDS, Int8Key
from qkv.backends.cpu.rows.rotation import RowLayout
from qkv.backends.cpu.rows.row_pass import RowPass, argument_words

_EMIT = EmitFunction("qkv.backends.cpu.rows.int8_kernel", "emit_int8_rows")

Array = NDArray[Any]

__all__ = ["int8_rows"]

_DTYPES = ("float64", "float32", "float16", "bfloat16")


@lru_cache(maxsize=16)
def _kernel(key: Int8Key, here: Host) -> Kernel:
    return Kernel(build(_EMIT, (key,), here))


def int8_rows(arrays: Sequence[Array], offset: Array | None) -> list[tuple[Array, Array]] | None:
    """Values and scales of one array or two of one dtype, the first less an offset (heads, dim).

    The arrays are (*batch_shape, heads, length, dim), or fewer of these dimensions. None if the
    kernel does not take them: there are no rows, or their type is none that it knows.

    Raises
    ------
    KernelBuildError
        If the kernel cannot be made on this machine.
    """
    dtype = arrays[0].dtype
    for array in arrays:
        known = array.dtype is dtype or array.dtype == dtype
        if not (known and array.size and array.flags.aligned):
            return None
    if dtype.name not in _DTYPES or not dtype.isnative:
        return None
    forms = tuple([_Form(array.shape, array.strides) for array in arrays])
    kept = None if offset is None else np.ascontiguousarray(offset, np.float32)
    return _rounding(dtype.name, forms, host()).run(arrays, kept)


class _Form(NamedTuple):
    """The shape and the strides of an array of rows."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def layout(self) -> RowLayout:
        """The same with a batch and a head of one where these dimensions are missing."""
        missing = max(3 - len(self.shape), 0)
        return RowLayout((*(1,) * missing, *self.shape), (*(0,) * missing, *self.strides))


class _Rounding:
    """Rounds the rows of arrays of these forms."""

    def __init__(self, dtype: str, forms: Sequence[_Form], here: Host) -> None:
        shape = here.shape_of(np.dtype(np.float64 if dtype == "float64" else np.float32))
        self._shapes = [(form.shape, form.shape[:-1]) for form in forms]
        layouts = [form.layout for form in forms]
        count = sum(layout.count for layout in layouts)
        values = {"limit": count, "first_count": layouts[0].count}
        for n, layout in enumerate(layouts):
            numbers = (*layout.numbers, layout.heads, layout.shape[-1])
            values |= {f"{name}_{n}": number for name, number in zip(_FIXED, numbers, strict=True)}
        self._layouts = layouts
        self._entries = sum(layout.entries for layout in layouts)
        kernel = _kernel(Int8Key(dtype, shape.lanes, shape.halves), here)
        places = [word for n in range(len(forms)) for word in _WORDS[n]]
        self._pass = RowPass(kernel, argument_words(INT8_FIELDS, values), places, count)

    def run(self, arrays: Sequence[Array], offset: Array | None) -> list[tuple[Array, Array]]:
        """Values and scales of each array."""
        at, pairs = quick_address_of, []
        numbers: list[int] = []
        taken = 0 if offset is None else at(offset)
        for array, (shape, of_scales) in zip(arrays, self._shapes, strict=True):
            values, scales = np.empty(shape, np.int8), np.empty(of_scales, np.float32)
            numbers += (at(array), at(values), at(scales), taken)
            pairs.append((values, scales))
            taken = 0
        self._pass.run(numbers, self._entries, (arrays, pairs, offset, self._layouts))
        return pairs


_rounding = lru_cache(maxsize=64)(_Rounding)

_FIXED = ("batches", "head_stride", "row_stride", "element_stride", "length", "heads", "dim")
_WORDS = [
    [word_index(f"{name}_{n}", INT8_FIELDS) for name in ("rows", "values", "scales", "offset")]
    for n in (0, 1)
]
"""What each run writes of an array: the addresses of its rows, results and offset."""
