"""What `write_arrays` leaves: a file that the format's own library reads, or nothing."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from qkv.errors import ArgumentError, DTypeError, FileError
from qkv.files import read_arrays, write_arrays
from qkv.files.writing import replace_file


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_library_and_the_reader_find_what_was_written(tmp_path: Path, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 3, 4)).astype(dtype) for _ in range(3))
    path = tmp_path / "arrays.safetensors"
    write_arrays(path, q[:, ::-1], k, v.swapaxes(0, 1), ["a", "\x1b[1m", "日"], {"model": "m"})
    found = read_arrays(path)
    assert found.query.tobytes() == q[:, ::-1].tobytes()
    assert found.value.shape == (3, 2, 4)
    assert (found.tokens, found.metadata) == (("a", "\x1b[1m", "日"), {"model": "m"})
    with safe_open(path, "np") as file:
        assert sorted(file.keys()) == ["k", "q", "v"]
        assert json.loads(file.metadata()["tokens"])[2] == "日"
    assert [f.name for f in tmp_path.iterdir()] == ["arrays.safetensors"]


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({2: "a"}, r"list\(metadata\)\[0\]=2 is not a str"),
        ({"a": None}, r"list\(metadata.values\(\)\)\[0\]=None is not a str"),
        ({"tokens": "xyz"}, "holds 'tokens'"),
        ([("a", "b")], "is not a Mapping"),
    ],
)
def test_metadata_that_cannot_be_kept_is_refused(tmp_path: Path, metadata: Any, words: str) -> None:
    """Numbers raised an error of the format's library; "tokens" left a file that nothing reads."""
    x = np.zeros((1, 1), np.float32)
    with pytest.raises(ArgumentError, match=words):
        write_arrays(tmp_path / "a.safetensors", x, x, x, metadata=metadata)
    assert not os.listdir(tmp_path)


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    x = np.zeros((1, 1), np.float32)
    write_arrays(tmp_path / "a.safetensors", x, x, x, metadata={"a\ud800": "\udfff"})
    assert read_arrays(tmp_path / "a.safetensors").metadata == {"a\ufffd": "\ufffd"}


def test_a_failure_keeps_what_was_there(tmp_path: Path) -> None:
    x = np.zeros((1, 1), np.float32)
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match="cannot be written"):
        write_arrays(tmp_path / "folder", x, x, x)
    with pytest.raises(FileError, match="cannot be written"):
        write_arrays(tmp_path / "missing" / "a", x, x, x)
    assert [f.name for f in tmp_path.rglob("*")] == ["folder"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes there")
def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    """Moved onto /dev/null, a page of a superuser would replace the device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(pipe.read_bytes)
        replace_file(pipe, b"a page")
        assert found.result(timeout=60) == b"a page"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_tensors_and_other_orders_of_bytes(tmp_path: Path) -> None:
    """safetensors' own reader finds what torch and NumPy held."""
    torch = pytest.importorskip("torch", reason="pip install torch")
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    tensor, path = torch.from_numpy(x).bfloat16(), tmp_path / "arrays.safetensors"
    write_arrays(path, tensor, tensor.float().requires_grad_(), x.astype(">f8").swapaxes(0, 1))
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("q"), tensor)
        assert torch.equal(file.get_tensor("k"), tensor.float())
        assert np.array_equal(file.get_tensor("v").numpy(), x.swapaxes(0, 1))
    with pytest.raises(DTypeError, match="q has dtype int64"):
        write_arrays(path, np.arange(4), x, x)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link, nowhere = (tmp_path / name for name in ("folder/real", "link", "nowhere"))
    real.parent.mkdir()
    real.write_bytes(b"old")
    link.symlink_to("folder/real")
    nowhere.symlink_to("folder/new")
    for path in (link, nowhere):
        replace_file(path, b"new")
        assert path.is_symlink()
        assert path.read_bytes() == b"new"
    assert real.read_bytes() == b"new"
    assert sorted(path.name for path in real.parent.iterdir()) == ["new", "real"]
