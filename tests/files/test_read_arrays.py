"""Arrays that NumPy and the safetensors library wrote come back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import qkv
from qkv.files import read_arrays

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
TOKENS = ["the", "cat", "日本", "", "\x1b[31m"]


def arrays(dtype: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 3)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def assert_same(path: Path, wanted: dict[str, np.ndarray]) -> None:
    found = read_arrays(path)
    for array, (name, expected) in zip(
        (found.query, found.key, found.value), wanted.items(), strict=True
    ):
        assert array.dtype == expected.dtype, name
        assert array.dtype.isnative
        assert array.tobytes() == expected.tobytes()
        assert array.shape == expected.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors(tmp_path: Path, dtype: Any) -> None:
    path = tmp_path / "arrays"  # told apart by content, not by name
    others = {"other": np.arange(3), "zz": np.zeros(7, np.uint8)}
    save_file(arrays(dtype) | others, path, {"tokens": json.dumps(TOKENS), "model": "m"})
    assert_same(path, arrays(dtype))
    assert read_arrays(path).tokens == tuple(TOKENS)
    assert read_arrays(path).metadata == {"model": "m"}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", DTYPES)
def test_npz(tmp_path: Path, dtype: Any, save: Any) -> None:
    path = tmp_path / "arrays.safetensors"
    with path.open("wb") as file:
        save(file, **arrays(dtype), tokens=np.array(TOKENS), other=np.array([None, {}]))
    assert_same(path, arrays(dtype))
    assert read_arrays(path).tokens == tuple(TOKENS)


def test_the_long_names(tmp_path: Path) -> None:
    short = arrays(np.float32)
    long = dict(zip(("query", "key", "value"), short.values(), strict=True))
    save_file(long, tmp_path / "a")
    np.savez(tmp_path / "b.npz", **long)
    assert_same(tmp_path / "a", short)
    assert_same(tmp_path / "b.npz", short)
    assert read_arrays(tmp_path / "a").tokens is None
    assert read_arrays(str(tmp_path / "b.npz")).tokens is None


def test_tokens_as_bytes(tmp_path: Path) -> None:
    encoded = np.array([t.encode() for t in ("a", "日本")])
    np.savez(tmp_path / "a.npz", **arrays(np.float32), tokens=encoded)
    assert read_arrays(tmp_path / "a.npz").tokens == ("a", "日本")


def test_other_orders_of_bytes_and_axes(tmp_path: Path) -> None:
    given = arrays(np.float32)
    swapped = {name: np.asfortranarray(a.astype(">f4")) for name, a in given.items()}
    np.savez(tmp_path / "a.npz", **swapped)
    assert_same(tmp_path / "a.npz", given)


def test_what_is_read_can_be_attended_to(tmp_path: Path) -> None:
    save_file(arrays(np.float32), tmp_path / "a")
    found = read_arrays(tmp_path / "a")
    out = qkv.attention(found.query, found.key, found.value)
    expected = qkv.attention(*arrays(np.float32).values())
    assert out.tobytes() == expected.tobytes()


def test_empty_and_scalar_shapes(tmp_path: Path) -> None:
    given = {"q": np.zeros((0, 8), "f4"), "k": np.zeros((3, 8), "f4"), "v": np.zeros((), "f4")}
    save_file(given, tmp_path / "a")
    np.savez(tmp_path / "b.npz", **given)
    assert_same(tmp_path / "a", given)
    assert_same(tmp_path / "b.npz", given)
