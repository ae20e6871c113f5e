"""The kernel cache on disk: used when it is right, survived whatever is wrong with it."""

import os
import stat
import sys

import numpy as np
import pytest

import qkv
from qkv.backends.cpu import backend as cpu_backend
from qkv.backends.cpu import compile as cpu_compile
from qkv.backends.cpu.host import host
from qkv.errors import KernelBuildError

X = np.random.default_rng(0).normal(size=(2, 9, 8)).astype(np.float32)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    cpu_backend._kernel.cache_clear()
    yield tmp_path / "deep" / "cache"
    cpu_backend._kernel.cache_clear()


@pytest.fixture
def compiled(monkeypatch):
    """How often LLVM was asked."""
    calls = []

    def count(*args, compile_=cpu_compile._compile):
        calls.append(args)
        return compile_(*args)

    monkeypatch.setattr(cpu_compile, "_compile", count)
    return calls


def attend():
    """A call in a process that has no kernels in memory."""
    cpu_backend._kernel.cache_clear()
    out = qkv.attention(X, X, X, backend="cpu")
    scores = np.einsum("hqd,hkd->hqk", X.astype(float), X) / np.sqrt(8)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(out, weights @ X, atol=2e-6)


def test_the_second_process_does_not_compile(folder, compiled) -> None:
    attend()
    attend()
    assert len(compiled) == 1
    (file,) = folder.iterdir()
    if os.name == "posix":
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign", "another kernel's"])
def test_a_damaged_file_is_compiled_again(folder, compiled, damage) -> None:
    attend()
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[-100] ^= 1
    elif damage == "empty":
        content.clear()
    elif damage == "foreign":
        content = bytearray(b"\x7fELF" + bytes(2000))
    else:
        qkv.attention(X, X, X, qkv.Causal(), backend="cpu")
        (other,) = (f for f in folder.iterdir() if f != file)
        content = bytearray(other.read_bytes())
    file.write_bytes(content)
    del compiled[:]
    attend()
    attend()
    assert len(compiled) == 1, "compiled once, and mended"


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_what_others_may_write_is_not_used(folder, compiled) -> None:
    attend()
    folder.chmod(0o777)
    attend()
    assert len(compiled) == 2
    folder.chmod(0o700)
    (file,) = folder.iterdir()
    file.chmod(0o666)
    attend()
    assert len(compiled) == 3


def test_the_least_recently_used_kernels_go(monkeypatch, folder, compiled) -> None:
    monkeypatch.setattr(cpu_compile, "KEPT_FILES", 3)
    folder.mkdir(parents=True, mode=0o700)
    for age in range(5):
        (folder / f"old{age}").write_bytes(b"")
        os.utime(folder / f"old{age}", (1e9 - age, 1e9 - age))
    attend()
    names = {file.name for file in folder.iterdir()}
    assert {"old0", "old1"} < names
    assert len(names) == 3
    (kept,) = names - {"old0", "old1"}
    os.utime(folder / kept, (1, 1))
    attend()
    assert len(compiled) == 1
    assert (folder / kept).stat().st_mtime > 1e9


def test_a_folder_that_cannot_be_made(monkeypatch, folder, compiled) -> None:
    folder.parent.write_text("a file where the folder should be")
    attend()
    attend()
    assert len(compiled) == 2


def test_a_full_disk(monkeypatch, folder, compiled) -> None:
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    attend()
    attend()
    assert len(compiled) == 2
    assert list(folder.iterdir()) == [], "nothing half-written stays"


def test_an_empty_name_turns_it_off(monkeypatch, folder, compiled) -> None:
    monkeypatch.setenv("QKV_CACHE_DIR", "")
    attend()
    attend()
    assert len(compiled) == 2
    assert cpu_compile.cache_folder() is None


@pytest.mark.skipif(sys.platform != "linux", reason="XDG is Linux's convention")
def test_where_it_is(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("QKV_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu_compile.cache_folder() == tmp_path / "qkv"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cpu_compile.cache_folder() == tmp_path / ".cache" / "qkv"


def test_code_that_cannot_be_built(folder) -> None:
    with pytest.raises(KernelBuildError, match="could not be made") as caught:
        cpu_compile.build("define nonsense", host())
    assert dict(caught.value.seen)["machine"].startswith(host().cpu)
    with pytest.raises(KernelBuildError):
        cpu_compile.build("define void @other() {\n ret void\n}", host())
