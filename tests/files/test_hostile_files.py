"""No file does harm: it is read, or refused with a `FileError` that says why."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save as save_safetensors

import qkv
from qkv.cli import main
from qkv.errors import FileError
from qkv.files import read_arrays

SPANS = {"q": [0, 16], "k": [16, 32], "v": [32, 48]}


def header(**changes: Any) -> dict[str, Any]:
    names = {
        name: {"dtype": "F32", "shape": [2, 2], "data_offsets": span}
        for name, span in SPANS.items()
    }
    return names | changes


def tensor(dtype: Any = "F32", shape: Any = (2, 2), span: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


def safetensors(head: Any = None, data: bytes = bytes(48)) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(header() if head is None else head)
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw + data


def npy(descr: Any = "<f4", shape: Any = (2, 2), data: bytes = bytes(16), text: str = "") -> bytes:
    npy_header = text or str({"descr": descr, "fortran_order": False, "shape": shape})
    return (
        b"\x93NUMPY\x01\x00"
        + struct.pack("<H", len(npy_header))
        + npy_header.encode("latin-1")
        + data
    )


def archive(compression: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as target:
        for name, data in ({"q": npy(), "k": npy(), "v": npy()} | members).items():
            target.writestr(f"{name}.npy", data)
    return file.getvalue()


def with_duplicate() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        for name in ("q", "k", "v", "r"):
            target.writestr(f"{name}.npy", npy())
    return file.getvalue().replace(b"r.npy", b"q.npy")


def in_one_place() -> bytes:
    """The directory says that k lies where q does; Python 3.14 only warns of it when it reads q."""
    data = bytearray(archive())
    second = data.index(b"PK\1\2", data.index(b"PK\1\2") + 1)
    data[second + 42 : second + 46] = bytes(4)
    return bytes(data)


def patched(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    assert len(old) == len(new)
    return data.replace(old, new)


def long_directory() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        for i in range(6000):
            target.writestr(f"{i}{'n' * 200}", b"")
    return file.getvalue()


def pickled() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Bomb()], dtype=object), allow_pickle=True)
    return file.getvalue()


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (99,)


Q = tensor()
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "one byte": (b"{", "neither"),
    "text": (b"hello, world, this is text", "neither"),
    "pickle": (pickle.dumps({"q": [1.0] * 9}), "pickle"),
    "single array": (npy(), "a single array"),
    # safetensors
    "header of terabytes": (struct.pack("<Q", 1 << 42) + b"{}", "4398046511104"),
    "header of 2**64 - 1": (b"\xff" * 8 + b"{}" + bytes(9), "18446744073709551615"),
    "header beyond the end": (struct.pack("<Q", 100) + b"{}", "at most 2"),
    "header cut": (safetensors()[:60], "at most 52"),
    "data cut": (safetensors()[:-1], "outside its 47"),
    "data added": (safetensors() + b"\0", "49 bytes of data"),
    "not UTF-8": (safetensors(b'{"\xff": 1}'), "no valid JSON"),
    "not JSON": (safetensors(b"{'q': 1}"), "no valid JSON"),
    "a header with nothing": (safetensors(b"{"), "no valid JSON"),
    "deep JSON": (safetensors(b'{"a":' * 100_000), "too deeply"),
    "long number": (safetensors(b'{"a":' + b"9" * 5000 + b"}"), "no valid JSON"),
    "twice": (safetensors(json.dumps(header()).replace('"k"', '"q"').encode()), "'q' twice"),
    "twice within": (
        safetensors(b'{"q": {"dtype": "F32", "dtype": "F64"}}'),
        "'dtype' twice",
    ),
    "metadata of numbers": (safetensors(header(__metadata__={"a": 1})), "metadata"),
    "metadata not an object": (safetensors(header(__metadata__=[])), "metadata"),
    "tokens not JSON": (safetensors(header(__metadata__={"tokens": "[1,"})), "tokens"),
    "tokens of numbers": (safetensors(header(__metadata__={"tokens": "[1]"})), "tokens"),
    "entry not an object": (safetensors(header(q=1)), "does not give dtype"),
    "entry without shape": (safetensors(header(q={"dtype": "F32"})), "does not give dtype"),
    "negative offset": (safetensors(header(q=tensor(span=(-16, 0)))), "outside"),
    "offset beyond": (safetensors(header(q=tensor(span=(0, 1 << 50)))), "outside"),
    "offsets reversed": (safetensors(header(q=tensor(span=(16, 0)))), "outside"),
    "offsets of floats": (safetensors(header(q=tensor(span=(0.0, 16.0)))), "outside"),
    "offsets of booleans": (safetensors(header(q=tensor(span=(False, True)))), "outside"),
    "three offsets": (safetensors(header(q=tensor(span=(0, 8, 16)))), "outside"),
    "overlap": (safetensors(header(k=tensor(span=(8, 24)))), "overlaps"),
    "hole": (safetensors(header(q=tensor(span=(4, 16)))), "hole"),
    "terabytes of zeros": (safetensors(header(q=tensor(shape=[1 << 40, 4]))), "17592186044416"),
    "overflowing shape": (safetensors(header(q=tensor(shape=[1 << 62, 1 << 62]))), "shape"),
    "negative shape": (safetensors(header(q=tensor(shape=[-2, -2]))), "shape"),
    "shape of floats": (safetensors(header(q=tensor(shape=[2.0, 2]))), "shape"),
    "shape of booleans": (safetensors(header(q=tensor(shape=[True, 4]))), "shape"),
    "shape not a list": (safetensors(header(q=tensor(shape=4))), "shape"),
    "too many dimensions": (safetensors(header(q=tensor(shape=[1] * 99))), "shape"),
    "endless heads without rows": (
        safetensors({n: tensor(shape=[1 << 40, 0, 4], span=(0, 0)) for n in "qkv"}, b""),
        "shape",
    ),
    "unknown dtype": (safetensors(header(q=tensor("F8_E9"))), "F8_E9"),
    "integers": (safetensors(header(q=tensor("I32"))), "float32"),
    "dtype not a string": (safetensors(header(q=tensor([]))), "holds 'q' as []"),
    "no arrays": (safetensors({}, b""), "does not have all"),
    "no v": (safetensors({"q": Q}, bytes(16)), "does not have all"),
    "both spellings": (
        safetensors({n: tensor(shape=[0], span=(0, 0)) for n in (*"qkv", "query", "key", "value")},
                    b""),
        "both",
    ),
    # npz
    "empty archive": (archive()[-22:].replace(b"\x03\0\x03\0", bytes(4)), "zip"),
    "archive cut": (archive()[:-30], "zip"),
    "archive cut early": (archive()[:40], "zip"),
    "archive of nothing": (b"PK\x05\x06" + bytes(18), "does not have all"),
    "arrays in one place": (in_one_place(), "'k' and another array in one place"),
    "name twice": (with_duplicate(), "'q' twice"),
    "checksum": (patched(archive(), npy(), npy()[:-1] + b"\1"), "zip"),
    "directory of megabytes": (long_directory(), "zip directory"),
    "objects": (archive(q=pickled()), "'|O'"),
    "objects as tokens": (archive(tokens=pickled()), "never loaded"),
    "numbers as tokens": (archive(tokens=npy()), "never loaded"),
    "structured": (archive(q=npy([("a", "<f4")])), "holds 'q'"),
    "huge element": (archive(q=npy("V1000000000")), "V1000000000"),
    "huge string": (archive(tokens=npy("<U999999999", (1,))), "tokens as"),
    "strings of no bytes": (archive(tokens=npy("<U0", (1 << 40,), b"")), "tokens as"),
    "many strings": (archive(tokens=npy("<U1", (1 << 40,), b"")), "4398046511104"),
    "matrix of tokens": (archive(tokens=npy("<U1", (2, 2))), "flat list"),
    "tokens out of Unicode": (archive(tokens=npy("<U1", (4,), b"\xff" * 16)), "not text"),
    "tokens not UTF-8": (archive(tokens=npy("|S4", (4,), b"\xff" * 16)), "not text"),
    "npy of terabytes": (archive(q=npy(shape=(1 << 40, 4))), "17592186044416"),
    "npy negative": (archive(q=npy(shape=(-2, -2))), "shape"),
    "npy not a shape": (archive(q=npy(shape=[2, 2])), "header"),
    "npy boolean shape": (archive(q=npy(shape=(True, 4))), "shape"),
    "npy shorter": (archive(q=npy(data=bytes(15))), "holds 15"),
    "npy longer": (archive(q=npy(data=bytes(17))), "holds 17"),
    "npy integers": (archive(q=npy("<i4")), "<i4"),
    "npy without header": (archive(q=b"abc"), "npy header"),
    "npy version 9": (archive(q=b"\x93NUMPY\x09\x00" + npy()[8:]), "npy header"),
    "npy header that is code": (archive(q=npy(text="__import__('os')._exit(99)")), "header"),
    "npy header that is a number": (archive(q=npy(text="1")), "header"),
    "npy header that warns": (archive(q=npy(text="{'descr': '\\d'}")), "header"),
    "npy header deep": (archive(q=npy(text="(" * 1000)), "header"),
    "npy header of signs": (archive(q=npy(text="-" * 1000 + "1")), "header"),
    "npy header too long": (archive(q=npy(text=" " * 60000)), "60000"),
    "npy header with more": (
        archive(q=npy(text="{'descr':'<f4','fortran_order':False,'shape':(4,),'x':1}")),
        "header",
    ),
    "npy order not a boolean": (
        archive(q=npy(text="{'descr':'<f4','fortran_order':0,'shape':(4,)}")),
        "header",
    ),
    "encrypted": (
        archive().replace(b"PK\x03\x04\x14\x00\x00", b"PK\x03\x04\x14\x00\x01")
        .replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01"),
        "packs 'q'",
    ),
    "bzip2": (archive(zipfile.ZIP_BZIP2), "packs 'q'"),
    "bomb": (
        archive(zipfile.ZIP_DEFLATED, q=npy(shape=(1 << 20, 4), data=b""))
        .replace(struct.pack("<L", len(npy(shape=(1 << 20, 4), data=b""))),
                 struct.pack("<L", len(npy(shape=(1 << 20, 4), data=b"")) + (1 << 24))),
        "16777216 bytes said, 0 there",
    ),
    "bomb beyond the limit": (
        archive(zipfile.ZIP_DEFLATED)
        .replace(struct.pack("<L", len(npy())), struct.pack("<L", (1 << 30) + 1)),
        "1073741825",
    ),
    "stored bomb": (
        archive().replace(struct.pack("<L", len(npy())), struct.pack("<L", 1 << 31)),
        "2147483648",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_refused_without_harm(tmp_path: Path, name: str) -> None:
    data, fact = HOSTILE[name]
    path = tmp_path / "hostile"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(FileError) as caught:
            read_arrays(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert fact in str(caught.value)
    assert repr(str(path)) in caught.value.fact
    assert caught.value.action
    # Nothing is allocated on the word of a header.
    assert peak < 8_000_000 + 40 * len(data)


def test_the_unchanged_files_are_fine(tmp_path: Path) -> None:
    for data in (safetensors(), archive(), archive(zipfile.ZIP_DEFLATED)):
        (tmp_path / "fine").write_bytes(data)
        assert read_arrays(tmp_path / "fine").query.shape == (2, 2)


def test_suffix_counts_as_the_same_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a", "w") as target:
        for name in ("q.npy", "k.npy", "v.npy", "q"):
            target.writestr(name, npy())
    with pytest.raises(FileError, match="'q' twice"):
        read_arrays(tmp_path / "a")


def test_a_real_bomb_takes_no_more_than_it_may(tmp_path: Path) -> None:
    """8 MB of zeros in 8 KB, whose header says that they are 16 bytes."""
    (tmp_path / "a").write_bytes(archive(zipfile.ZIP_DEFLATED, q=npy(data=bytes(1 << 23))))
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match="holds 8388608"):
            read_arrays(tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_lone_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(safetensors(header(__metadata__={"tokens": '["\\ud800", "b"]'})))
    assert read_arrays(tmp_path / "a").tokens == ("�", "b")


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    for path, fact in {
        tmp_path / "missing": "No such file",
        tmp_path: "is a folder",
        "nul\0byte": "is not a path",
        "/dev/zero": "not a regular file",
        "x" * 5000: "cannot be read",
    }.items():
        with pytest.raises(FileError, match=fact):
            read_arrays(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read in (read_arrays, qkv.Record.load, qkv.ModelRecord.load):
        with pytest.raises(FileError, match="not a regular file"):
            read(tmp_path / "pipe")
    assert main(["inspect", str(tmp_path / "pipe")]) == 2


def test_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(safetensors())
    (tmp_path / "good").symlink_to(tmp_path / "file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    assert read_arrays(tmp_path / "good").key.shape == (2, 2)
    for name in ("loop", "dangling"):
        with pytest.raises(FileError, match="cannot be read"):
            read_arrays(tmp_path / name)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by hand: a user who may read everything runs the tests of many build systems."""
    (tmp_path / "file").write_bytes(safetensors())

    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(FileError, match="Permission denied"):
        read_arrays(tmp_path / "file")


def test_a_file_that_shrinks_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(safetensors())
    size = len(safetensors())
    os.truncate(tmp_path / "file", size - 20)
    real = os.fstat

    def before(descriptor: int) -> Any:
        status = real(descriptor)
        return type("Status", (), {"st_size": size, "st_mode": status.st_mode})

    monkeypatch.setattr("qkv.files.os.fstat", before)
    with pytest.raises(FileError, match="ends within 'k'"):
        read_arrays(tmp_path / "file")


def mutations(data: bytes, rng: random.Random) -> bytes:
    """A few bytes flipped, cut, doubled, or replaced by numbers that parsers mistake."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed))
        match rng.randrange(5):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                changed[at] ^= 1 << rng.randrange(8)
            case 2:
                del changed[at : at + rng.randint(1, 40)]
            case 3:
                changed[at:at] = changed[at : at + rng.randint(1, 40)]
            case _:
                odd = rng.choice(
                    (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\x80", b"9", b"-", b'"')
                )
                changed[at : at + len(odd)] = odd
        if not changed:
            break
    return bytes(changed)


def with_numpy(save: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    save(file, q=x, k=x, v=x, tokens=np.array(["a", "bc", "def"]))
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [
        save_safetensors({n: np.eye(3, dtype="f4") for n in "qkv"}, {"tokens": '["a", "b", "c"]'}),
        with_numpy(np.savez),
        with_numpy(np.savez_compressed),
    ],
    ids=["safetensors", "npz", "compressed"],
)  # fmt: skip
def test_mutations(tmp_path: Path, seed: bytes) -> None:
    rng = random.Random(20240)
    path = tmp_path / "mutant"
    read = 0
    for _ in range(1500):
        path.write_bytes(mutations(seed, rng))
        with contextlib.suppress(FileError):
            found = read_arrays(path)
            assert found.query.nbytes <= 4 * len(seed)
            read += 1
    assert 0 < read < 1500
