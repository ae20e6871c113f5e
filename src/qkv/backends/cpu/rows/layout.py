"""What calls must know of the kernels: what their code depends on, and their argument words."""

from __future__ import annotations

from dataclasses import dataclass

SHARED_FIELDS = ("limit", "first_count", "dim", "pairs")

ROW_FIELDS = (
    "rows", "batches", "head_stride", "row_stride", "element_stride", "out", "heads", "length",
    "cosines", "sines", "table_bytes",
)  # fmt: skip

ROTATION_FIELDS = (*SHARED_FIELDS, *[f"{name}_{n}" for n in (0, 1) for name in ROW_FIELDS])
"""Words of the argument block after the counter. Tasks below `first_count` rotate heads of the
first array, the others of the second. From the angles of one batch row to those of the next it is
`table_bytes`, 0 if all share one table."""


@dataclass(frozen=True, slots=True)
class RotationKey:
    """What the kernel depends on; `lanes` are of float64."""

    dtype: str
    out_dtype: str
    interleaved: bool
    lanes: int
    halves: bool


SINKS_FIELDS = (
    "limit", "sinks", "keys_out", "keys_lse", "rest", "out", "lse", "heads", "length", "dim",
)  # fmt: skip
"""Words of the argument block after the counter. `keys_out` and `keys_lse` are of the keys alone;
`lse` may be where `keys_lse` is; `rest`, what rounding took from lse, is 0 if it is not needed."""


@dataclass(frozen=True, slots=True)
class SinksKey:
    """What the kernel depends on: types of computation and of the output.

    If it `keeps` the output as it is before it is rounded, it writes that over `keys_out`.
    """

    dtype: str
    out_dtype: str
    lanes: int
    halves: bool
    fused: bool
    keeps: bool = False


INT8_ROW_FIELDS = (
    "rows", "batches", "head_stride", "row_stride", "element_stride", "values", "scales", "offset",
    "heads", "length", "dim",
)  # fmt: skip

INT8_FIELDS = ("limit", "first_count", *[f"{name}_{n}" for n in (0, 1) for name in INT8_ROW_FIELDS])
"""Words of the argument block after the counter. Tasks below `first_count` round rows of the first
array, the others of the second. `offset`, which is 0 for none, has a row for each head."""


@dataclass(frozen=True, slots=True)
class Int8Key:
    """What the kernel depends on; `lanes` are of the type of computation."""

    dtype: str
    lanes: int
    halves: bool
