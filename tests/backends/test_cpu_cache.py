"""The kernel cache on disk: used when it is right, survived whatever is wrong with it."""

import ast
import errno
import gc
import math
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.backends.cpu import describe_host
from qkv.backends.cpu.compiler import compile as cpu_compile
from qkv.backends.cpu.compiler import stored_kernels
from qkv.backends.cpu.compiler.canonical import canonical
from qkv.backends.cpu.forward import kernel as cpu_forward
from qkv.backends.cpu.machine import stored_files
from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.machine.processor import processor
from qkv.backends.cpu.passes import forward as forward_pass
from qkv.errors import KernelBuildError
from qkv.problem.building.check import check
from qkv.problem.language.expressions import SCORE, Const, Op, operation
from watched import forget_prepared_calls

X = np.random.default_rng(0).normal(size=(2, 80, 8)).astype(np.float32)
MODULES, MASKED_MODULES = 2, 3
"""Modules of a kernel: its own, one of all kernels, and one of those that may forbid pairs."""


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    monkeypatch.setattr(stored_files, "_faults", [])
    forget_kernels()
    yield tmp_path / "deep" / "cache"
    forget_kernels()


@pytest.fixture
def compiled(monkeypatch):
    """How often LLVM was asked."""
    calls = []

    def count(*args, compile_=cpu_compile._compile):
        calls.append(args)
        return compile_(*args)

    monkeypatch.setattr(cpu_compile, "_compile", count)
    return calls


def forget_kernels() -> None:
    """Forget all kernels, and the calls that hold one."""
    forward_pass._kernel.cache_clear()
    forget_prepared_calls()


def attend():
    """A call in a process that has no kernels in memory."""
    forget_kernels()
    out = qkv.attention(X, X, X, backend="cpu")
    scores = np.einsum("hqd,hkd->hqk", X.astype(float), X) / np.sqrt(8)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(out, weights @ X, atol=2e-6)


def test_the_second_process_does_not_compile(folder, compiled) -> None:
    attend()
    attend()
    assert len(compiled) == MODULES
    files = stored_files.kernel_files(folder)
    assert len(files) == MODULES
    if os.name == "posix":
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_another_mask_compiles_only_what_is_its_own(folder, compiled) -> None:
    attend()
    for mask, new in [(qkv.Causal(), 2), (qkv.SlidingWindow(5, 5), 1), (qkv.Softcap(9.0), 1)]:
        del compiled[:]
        qkv.attention(X, X, X, mask, backend="cpu")
        assert len(compiled) == new


@pytest.mark.sampled(
    "damage", ["truncated", "flipped", "empty", "foreign", "another kernel's"], one_in=5
)
def test_a_damaged_file_is_compiled_again(folder, compiled, damage) -> None:
    attend()
    files = stored_files.kernel_files(folder)
    qkv.attention(X, X, X, qkv.Causal(), backend="cpu")
    (other, *_) = set(stored_files.kernel_files(folder)) - set(files)
    for file in files:
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
            content = bytearray(other.read_bytes())
        file.write_bytes(content)
    del compiled[:]
    attend()
    attend()
    assert len(compiled) == MODULES, "compiled once, and mended"


def test_a_cached_kernel_is_found_without_emitting_it(folder, monkeypatch) -> None:
    attend()

    def refuse(*args):
        raise AssertionError("emitted again")

    monkeypatch.setattr(cpu_forward, "ForwardFrame", refuse)
    attend()


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_what_others_may_write_is_not_used(folder, compiled) -> None:
    attend()
    folder.chmod(0o777)
    with pytest.warns(qkv.KernelCacheWarning, match="others may write to it"):
        attend()
    assert len(compiled) == 2 * MODULES
    folder.chmod(0o700)
    file, *_ = stored_files.kernel_files(folder)
    file.chmod(0o666)
    attend()
    assert len(compiled) == 2 * MODULES + 1


def test_the_least_recently_used_kernels_go(monkeypatch, folder, compiled) -> None:
    monkeypatch.setattr(stored_files, "KEPT_FILES", 2 + MODULES)
    folder.mkdir(parents=True, mode=0o700)
    old = [f"{age:064x}" for age in range(5)]
    for age, name in enumerate(old):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    own = folder / "notes.txt"
    own.write_text("not a kernel")
    os.utime(own, (1, 1))
    attend()
    assert own.exists()
    names = {file.name for file in folder.iterdir()} - {own.name}
    assert set(old[:2]) < names
    assert len(names) == 2 + MODULES
    kept = names - set(old)
    for name in kept:
        os.utime(folder / name, (1, 1))
    attend()
    assert len(compiled) == MODULES
    assert min((folder / name).stat().st_mtime for name in kept) > 1e9


def test_a_kernel_that_another_process_deletes_meanwhile(monkeypatch, folder, compiled) -> None:
    """The kernel is in the list of files, and gone when its age is asked for; nobody is warned."""
    monkeypatch.setattr(stored_files, "KEPT_FILES", 0)
    gone = folder / f"{1:064x}"
    listed = stored_files._our_files
    monkeypatch.setattr(stored_files, "_our_files", lambda place: [gone, *listed(place)])
    attend()
    assert len(compiled) == MODULES
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_made(monkeypatch, folder, compiled) -> None:
    folder.parent.write_text("a file where the folder should be")
    with pytest.warns(qkv.KernelCacheWarning, match="QKV_CACHE_DIR") as caught:
        attend()
    attend()  # Which would raise if it were said again.
    assert len(compiled) == 2 * MODULES
    assert str(folder.parent) in str(caught[0].message)
    cache = describe_host()["kernel cache"]
    assert cache.startswith("unusable: ")
    assert str(folder.parent) in cache


@pytest.mark.slow
@pytest.mark.parametrize("refused", ["utime mkstemp", "utime replace unlink"])
def test_a_folder_that_may_only_be_read(monkeypatch, folder, compiled, refused) -> None:
    attend()

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in refused.split():
        monkeypatch.setattr(tempfile if name == "mkstemp" else os, name, refuse)
    attend()
    assert len(compiled) == MODULES, "what is there is used"
    with pytest.warns(qkv.KernelCacheWarning, match="Permission denied"):
        qkv.attention(X, X, X, qkv.Causal(), backend="cpu")
    attend()
    assert len(compiled) == MODULES + 2


@pytest.mark.slow
@pytest.mark.parametrize("call", ["replace", "fdopen"])
def test_a_full_disk(monkeypatch, folder, compiled, call) -> None:
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.warns(qkv.KernelCacheWarning, match="No space left") as caught:
        attend()
    assert f"again: {folder}: No space left on device. Set" in str(caught[0].message)
    attend()
    assert len(compiled) == 2 * MODULES
    assert list(folder.iterdir()) == [], "nothing half-written stays"


SCRIPT = """
import numpy as np, qkv, sys
from qkv.backends.cpu.compiler import compile as cpu_compile
compiled = []
def count(*args, compile_=cpu_compile._compile):
    compiled.append(args)
    return compile_(*args)
cpu_compile._compile = count
x = np.random.default_rng(0).normal(size=(2, 9, 8)).astype(np.float32)
out = qkv.attention(x, x, x, qkv.Causal(), backend="cpu")
print(len(compiled), out.tobytes().hex())
"""


def start(folder, script: str = SCRIPT, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "QKV_CACHE_DIR": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process) -> tuple[int, str]:
    """How often it compiled, and the bits of its result."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    count, bits = out.split()
    return int(count), bits


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_files_that_may_not_grow(tmp_path) -> None:
    """A disk that fills up in the midst of a file does the same."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    assert finish(start(tmp_path, limit + SCRIPT))[0] == MASKED_MODULES
    assert stored_files.kernel_files(tmp_path) == []


@pytest.mark.slow
def test_processes_that_compile_at_once(tmp_path) -> None:
    found = [finish(process) for process in [start(tmp_path) for _ in range(3)]]
    assert len({bits for _, bits in found}) == 1
    assert len(stored_files.kernel_files(tmp_path)) == MASKED_MODULES
    assert finish(start(tmp_path)) == (0, found[0][1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "edited", ["backends/cpu/emit/vector_math.py", "problem/language/bounds.py"]
)
def test_an_edited_source_is_another_kernel(tmp_path, edited) -> None:
    package, folder = tmp_path / "qkv", tmp_path / "kernels"
    shutil.copytree(Path(qkv.__file__).parent, package)

    def compilations() -> int:
        return finish(start(folder, PYTHONPATH=str(tmp_path)))[0]

    def remark(file: str) -> None:
        with open(package / file, "a") as opened:
            opened.write("# a remark\n")

    assert (compilations(), compilations()) == (MASKED_MODULES, 0)
    remark("problem/building/check.py")
    remark("backends/cpu/backend.py")
    assert compilations() == 0, "nothing there emits code"
    remark(edited)
    assert (compilations(), compilations()) == (MASKED_MODULES, 0)


def imported(file: Path) -> set[Path]:
    """The files of qkv that a file imports, packages left out."""
    root, found = Path(qkv.__file__).parents[1], set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qkv."):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            files = [root.joinpath(*name.split(".")).with_suffix(".py") for name in names]
            found.update(file for file in files if file.exists())
    return found


def test_whatever_emits_code_is_digested() -> None:
    """The digest covers the modules that emit kernels, and whatever they import."""
    package = Path(qkv.__file__).parent
    digested = stored_kernels.emitter_files(package)
    reached = set().union(*map(imported, digested)) - set(digested)
    assert {str(file.relative_to(package)) for file in reached} == DECIDES_NO_CODE


def test_what_is_called_emit_is_digested() -> None:
    package = Path(qkv.__file__).parent
    digested = set(stored_kernels.emitter_files(package))
    emitting = {
        file
        for file in package.joinpath("backends", "cpu").rglob("*.py")
        if re.search(r"^ *def emit(_\w+)?\(", file.read_text(), re.MULTILINE)
    }
    assert len(emitting) > 10
    assert emitting <= digested


DECIDES_NO_CODE = {
    "errors.py", "process/forks.py", "process/threads.py", "arguments/declarations.py",
    "backends/cpu/compiler/elf_object.py", "backends/cpu/compiler/stack_probe.py",
    "backends/cpu/compiler/stored_kernels.py",
    "arrays/addresses.py",
    "backends/cpu/machine/executable_memory.py", "backends/cpu/machine/host.py",
    "backends/cpu/machine/stored_files.py",
    "backends/cpu/python_calls/filled_block.py", "backends/cpu/python_calls/function.py",
    "backends/cpu/threads/jobs.py",
}  # fmt: skip
"""Imported by files that emit code, but not by what these emit. The machine is part of a key."""


def test_without_sources_nothing_is_cached(monkeypatch, folder, compiled) -> None:
    """A package of bytecode alone: nobody could tell one version from the next."""
    monkeypatch.setattr(stored_kernels, "_SOURCES", None)
    attend()
    attend()
    assert len(compiled) == 2 * MODULES
    assert not folder.exists() or not list(folder.iterdir())


def digest(module="a", function="emit", arguments=(), **of_host) -> str | None:
    return stored_kernels.digest(module, function, arguments, replace(host(), **of_host))


def test_what_a_key_depends_on(monkeypatch) -> None:
    names = {
        digest(),
        digest("b"),
        digest(function="emit_other"),
        digest(arguments=(1,)),
        digest(arguments=(True,)),
        digest(cpu="another"),
        digest(features="+another"),
    }
    for changed in ("triple", "llvm", "llvmlite"):
        described = replace(processor(), **{changed: "another"})
        monkeypatch.setattr(stored_kernels, "processor", lambda described=described: described)
        names.add(digest())
    monkeypatch.setattr(stored_kernels, "_SOURCES", "other")
    names.add(digest())
    assert len(names) == 11


def test_an_empty_name_turns_the_cache_off(monkeypatch, folder, compiled) -> None:
    monkeypatch.setenv("QKV_CACHE_DIR", "")
    attend()
    attend()
    assert len(compiled) == 2 * MODULES
    assert stored_files.cache_folder() is None


@pytest.mark.skipif(sys.platform != "linux", reason="XDG is Linux's convention")
def test_where_it_is(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("QKV_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stored_files.cache_folder() == tmp_path / "qkv"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert stored_files.cache_folder() == tmp_path / ".cache" / "qkv"


def nonsense() -> str:
    return "define nonsense"


def nothing_to_do() -> str:
    return "define void @other() {\n ret void\n}"


@pytest.mark.parametrize("emit", [nonsense, nothing_to_do])
def test_code_that_cannot_be_built(folder, emit) -> None:
    with pytest.raises(KernelBuildError, match="could not be made") as caught:
        cpu_compile.build(cpu_compile.EmitFunction(__name__, emit.__name__), (), host())
    assert dict(caught.value.seen)["machine"].startswith(host().cpu)
    assert not list(folder.iterdir())


def empty_job() -> str:
    return "define void @job() {\n ret void\n}"


def empty_shared() -> str:
    return "define void @shared() {\n ret void\n}"


def built_of_two(first, second) -> Any:
    """Code of a kernel and of a module that is compiled before its text is written."""
    emit = [cpu_compile.EmitFunction(__name__, each.__name__) for each in (first, second)]
    module = cpu_compile.Module(emit[1], ())
    return cpu_compile.build(emit[0], (), host(), shared=(module,))


def test_texts_are_written_while_llvm_works_on_others(folder, monkeypatch) -> None:
    threads = []

    def compiling(text, host, compile_=cpu_compile._compile):
        threads.append(threading.current_thread().name)
        return compile_(text, host)

    monkeypatch.setattr(cpu_compile, "_compile", compiling)
    assert built_of_two(empty_job, empty_shared).address("job")
    assert threads == 2 * ["qkv-compiler"]


def test_a_process_that_may_start_no_thread_compiles_in_its_own(folder, monkeypatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert built_of_two(empty_job, empty_shared).address("job")


def interrupted() -> str:
    raise KeyboardInterrupt


def test_an_interrupted_process_waits_for_llvm(folder, monkeypatch) -> None:
    """LLVM must not be at work when the lock is free, which a fork waits for."""
    done = []

    def slowly(text, host, compile_=cpu_compile._compile):
        time.sleep(0.2)
        done.append(compile_(text, host))
        return done[0]

    monkeypatch.setattr(cpu_compile, "_compile", slowly)
    with pytest.raises(KeyboardInterrupt):
        built_of_two(interrupted, empty_shared)
    assert len(done) == 1


# The text that a key is made from


@pytest.mark.parametrize("wanted", [True, False])
def test_garbage_is_not_collected_while_a_kernel_is_emitted(folder, monkeypatch, wanted) -> None:
    """The collector is as it was afterwards, also if there is no kernel."""
    (gc.enable if wanted else gc.disable)()
    states = []

    def failing(_):
        states.append(gc.isenabled())
        raise RuntimeError("no module")

    try:
        monkeypatch.setattr(cpu_compile.EmitFunction, "__call__", failing)
        monkeypatch.setattr(stored_kernels, "digest", lambda *_: "0" * 64)
        with pytest.raises(RuntimeError, match="no module"):
            cpu_compile.build(cpu_compile.EmitFunction("a", "b"), (), host())
        assert states == [False]
        assert gc.isenabled() is wanted
    finally:
        gc.enable()


def test_different_values_have_different_texts() -> None:
    values = [
        None, True, False, 0, 1, -1, 0.0, -0.0, 1.0, math.nextafter(1.0, 2.0), float("nan"),
        float("inf"), "", "1", "None", "a b", "a", "b", "a\nb", "a\\nb",
        (), ((),), ((), ()), (1,), (1, 1), ("a", "b"), ("a b",), (("a",), "b"), ("a", ("b",)),
        Const("float", 1.0), Const("float", 0.0), Const("float", -0.0), Const("int", 1),
        Const("bool", True), ("int", 1), operation("add", SCORE, Const("float", -0.0)),
        operation("sub", SCORE, Const("float", 1.0)), operation("sub", Const("float", 1.0), SCORE),
    ]  # fmt: skip
    texts = [canonical(value) for value in values]
    assert len(set(texts)) == len(values)


def test_equal_values_have_equal_texts() -> None:
    """Whether their equal parts are one object or two."""

    def tower(height: int, shared: bool) -> tuple:
        value: tuple = ("leaf", 1.5)
        for _ in range(height):
            value = (value, value if shared else copied(value))
        return value

    def copied(value):
        return tuple([copied(part) for part in value]) if type(value) is tuple else value

    assert canonical(tower(6, True)) == canonical(tower(6, False))
    assert canonical(1e300 * 1e10) == canonical(float("inf"))
    problems = [check(X, X, X, (qkv.Softcap(cap), qkv.Causal("end"))) for cap in (3.0, 5.0)]
    one, other = (problem.spec.kernel_key for problem in problems)
    assert canonical(one) == canonical(other)


def test_the_text_is_linear_in_what_is_distinct() -> None:
    lengths = []
    for height in (100, 200, 400):
        node = SCORE
        for _ in range(height):
            node = Op("add", "float", (node, node))  # written out, 2**height scores
        lengths.append(len(canonical(node)))
    assert lengths[2] - lengths[1] < 2.5 * (lengths[1] - lengths[0])


@pytest.mark.parametrize("value", [[1], {1: 2}, np.float32(1), np.eye(2), object()])
def test_a_value_without_a_text(value) -> None:
    with pytest.raises(TypeError, match="no canonical text"):
        canonical((1, value))
