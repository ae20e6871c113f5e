"""Rows rounded to int8 by compiled code, held against a loop over rows, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from forced import instruction_sets
from qkv.backends.cpu.rows.int8 import int8_rows

Array = NDArray[Any]

DTYPES = (np.float64, np.float32, np.float16, bfloat16)


def rounded(row: Array) -> tuple[Array, np.float32]:
    """Values and the scale of one row, by the formula, in its type of computation."""
    with np.errstate(all="ignore"):
        scale = np.float32(np.abs(row).max() / row.dtype.type(127))
        quotients = row / row.dtype.type(scale if scale else 1)
    whole = [round(float(x)) if np.isfinite(x) else 0 for x in quotients]  # Ties to even.
    return np.clip(whole, -127, 127).astype(np.int8), scale


def laid_out(rng: np.random.Generator, rows: Array) -> Array:
    """The same rows in another order in memory."""
    match rng.integers(5):
        case 1 if rows.ndim > 2:
            return np.ascontiguousarray(rows.swapaxes(-3, -2)).swapaxes(-3, -2)
        case 2:
            return np.repeat(rows, 2, axis=-1)[..., ::2]
        case 3:
            return np.ascontiguousarray(rows[..., ::-1])[..., ::-1]
        case 4:
            return np.broadcast_to(rows[:1], rows.shape)
    return rows


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Rows of any size, some of them with zeros only, halves, NaN or infinity."""
    rows = rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 4, (*shape[:-1], 1))
    special = rng.integers(6, size=(*shape[:-1], 1))
    rows = np.where(special == 0, 0, np.where(special == 1, np.round(2 * rows) / 2, rows))
    place = rng.integers(shape[-1])
    rows[..., place] = np.where(special[..., 0] == 2, np.inf, rows[..., place])
    rows[..., place] = np.where(special[..., 0] == 3, np.nan, rows[..., place])
    with np.errstate(all="ignore"):
        return laid_out(rng, rows.astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", instruction_sets())
def test_rows_are_rounded(monkeypatch: pytest.MonkeyPatch, isa: str, dtype: Any) -> None:
    monkeypatch.setenv("QKV_ISA", isa)
    rng = np.random.default_rng(7)
    for _ in range(60):
        shape = tuple(map(int, (*rng.integers(1, 4, rng.integers(3)), *rng.integers(1, 6, 2))))
        shape = (*shape[:-1], int(rng.choice([1, 3, 8, 15, 16, 33, 64, 100])))
        arrays = [drawn(rng, shape, dtype) for _ in range(rng.integers(1, 3))]
        heads = shape[-3] if len(shape) > 2 else 1
        offset = rng.standard_normal((heads, shape[-1])).astype(np.float32)
        taken = [None, offset][rng.integers(2)]
        found = int8_rows(arrays, taken)
        assert found is not None
        for n, (rows, (values, scales)) in enumerate(zip(arrays, found, strict=True)):
            wide = rows.astype(np.float64 if dtype is np.float64 else np.float32)
            if taken is not None and n == 0:
                wide = wide - (offset[:, None] if len(shape) > 2 else offset)
            for place in np.ndindex(shape[:-1]):
                expected, scale = rounded(wide[place])
                np.testing.assert_array_equal(scales[place], scale)
                if np.isfinite(scale):
                    np.testing.assert_array_equal(values[place], expected)


def test_what_the_kernel_does_not_take() -> None:
    rows = np.ones((2, 3, 4), np.float32)
    assert int8_rows([rows[:, :0]], None) is None
    assert int8_rows([rows.astype(np.longdouble)], None) is None
    assert int8_rows([rows.astype(">f4")], None) is None
    assert int8_rows([rows, rows.astype(np.float64)], None) is None
    unaligned = np.frombuffer(b"\0" + rows.tobytes(), np.uint8)[1:].view(np.float32)
    assert int8_rows([unaligned.reshape(rows.shape)], None) is None
