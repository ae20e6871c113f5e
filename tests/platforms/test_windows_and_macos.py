"""What differs on Windows and macOS, with the names of these systems in the place of Linux's."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import qkv
from processes import in_a_process
from qkv.backends.cpu.compiler import stack_probe
from qkv.backends.cpu.machine import stored_files

X = np.random.default_rng(0).normal(size=(2, 9, 8)).astype(np.float32)


def expected() -> np.ndarray:
    scores = np.einsum("hqd,hkd->hqk", X.astype(float), X) / np.sqrt(8)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    return weights @ X


# The kernel cache


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty kernel cache, nothing in memory, and no fault that was warned of before."""
    from qkv.backends.cpu.passes import decode, forward
    from qkv.call.repeated.cache import CALLS

    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(stored_files, "_faults", [])
    for either in (decode, forward):  # Which it is depends on the instruction set.
        either._kernel.cache_clear()
    CALLS.clear()
    return tmp_path / "kernels"


def refuse(*args: object, **keywords: object) -> None:
    raise PermissionError(13, "Access is denied")


def test_a_kernel_that_another_process_writes_and_reads_meanwhile(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Windows replaces no open file: the other's file holds the same kernel, and is kept."""
    real = os.replace

    def written_by_the_other(source: str, target: str) -> None:
        real(source, target)
        Path(source).touch()
        refuse()

    monkeypatch.setattr(os, "replace", written_by_the_other)
    np.testing.assert_allclose(qkv.attention(X, X, X, backend="cpu"), expected(), atol=2e-6)
    assert {len(file.name) for file in folder.iterdir()} == {64}


def test_a_folder_that_may_not_be_written_to_is_still_warned_of(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(qkv.KernelCacheWarning, match="Access is denied"):
        qkv.attention(X, X, X, backend="cpu")
    assert not list(folder.iterdir())


def test_an_old_kernel_that_another_process_reads_stays(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Windows deletes no open file."""
    monkeypatch.setattr(stored_files, "KEPT_FILES", 0)
    monkeypatch.setattr(Path, "unlink", refuse)
    qkv.attention(X, X, X, backend="cpu")
    assert {len(file.name) for file in folder.iterdir()} == {64}


# The stack probe


def test_windows_gets_the_address_of_its_stack_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite.binding as llvm

    function = ctypes.CFUNCTYPE(None)(lambda: None)
    libraries = {"ntdll": SimpleNamespace(__chkstk=function)}
    added = {}
    monkeypatch.setattr(llvm, "add_symbol", added.__setitem__)
    stack_probe.register_stack_probe()
    assert added == {}, "other systems have none"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "WinDLL", libraries.__getitem__, raising=False)
    stack_probe.register_stack_probe()
    assert added == {"__chkstk": ctypes.cast(function, ctypes.c_void_p).value}
    libraries["ntdll"] = SimpleNamespace()
    with pytest.raises(OSError, match="no __chkstk in ntdll"):
        stack_probe.register_stack_probe()


COFF = """
    import ctypes, sys
    from types import SimpleNamespace
    import llvmlite.binding as llvm
    from qkv.backends.cpu.compiler.stack_probe import register_stack_probe

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()

    def load(text, triple):
        machine = llvm.Target.from_triple(triple).create_target_machine(opt=2, jit=True)
        module = llvm.parse_assembly(text)
        module.triple, module.data_layout = triple, str(machine.target_data)
        data = machine.emit_object(module)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        engine.finalize_object()
        return engine

    # Linux needs no probe, so this one only returns: rax holds the size, and stays.
    here = llvm.get_process_triple()
    probe = load("define void @probe() { ret void }", here)
    address = probe.get_function_address("probe")
    system, sys.platform = sys.platform, "win32"
    function = ctypes.CFUNCTYPE(None)(address)
    ctypes.WinDLL = lambda name: SimpleNamespace(**{"__chkstk": function})
    if REGISTERED:
        register_stack_probe()
    sys.platform = system

    # The sum of the squares below n, which lie in a frame of 40,000 bytes meanwhile. With nounwind
    # there is no table for unwinding: libgcc 13 and later would read the table of Windows as one of
    # Linux, and the process would end.
    there = load('''define i64 @job(i64 %n) nounwind {
    entry:
        %squares = alloca [5000 x i64]
        br label %write
    write:
        %i = phi i64 [0, %entry], [%j, %write]
        %place = getelementptr [5000 x i64], ptr %squares, i64 0, i64 %i
        %square = mul i64 %i, %i
        store volatile i64 %square, ptr %place
        %j = add i64 %i, 1
        %more = icmp ult i64 %j, %n
        br i1 %more, label %write, label %read
    read:
        %k = phi i64 [0, %write], [%l, %read]
        %sum = phi i64 [0, %write], [%total, %read]
        %from = getelementptr [5000 x i64], ptr %squares, i64 0, i64 %k
        %found = load volatile i64, ptr %from
        %total = add i64 %sum, %found
        %l = add i64 %k, 1
        %again = icmp ult i64 %l, %n
        br i1 %again, label %read, label %end
    end:
        ret i64 %total
    }''', "x86_64-pc-windows-msvc")
    job = there.get_function_address("job")
    # A function of this system that calls one of Windows.
    bridge = load(f'''define i64 @call(i64 %n) {{
        %job = inttoptr i64 {job} to ptr
        %sum = call win64cc i64 %job(i64 %n)
        ret i64 %sum
    }}''', here)
    call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(bridge.get_function_address("call"))
    print(call(4000))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64",
    reason="code of Windows runs where its instructions are those of this processor",
)
def test_code_of_windows_with_a_large_frame_is_linked_and_runs() -> None:
    printed = in_a_process(COFF.replace("REGISTERED", "True"))
    assert int(printed) == sum(i * i for i in range(4000))
    with pytest.raises(AssertionError, match="exit -"):  # The process ends.
        in_a_process(COFF.replace("REGISTERED", "False"))


# The port of the lab


class Socket:
    """Notes what is set."""

    def __init__(self, *args: object) -> None:
        self.options: list[tuple[int, int, int]] = []

    def setsockopt(self, *option: int) -> None:
        self.options.append(option)  # type: ignore[arg-type]

    def bind(self, address: object) -> None: ...


@pytest.mark.parametrize("port", [0, 8123])
def test_no_second_process_may_answer_at_the_lab_s_port(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    from qkv.lab.serving import server

    exclusive = ~socket.SO_REUSEADDR  # As Windows defines it.
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", exclusive, raising=False)
    monkeypatch.setattr(socket, "socket", Socket)
    assert server.listen(port).options == [(socket.SOL_SOCKET, exclusive, 1)]


# The threads of torch


def linked_as(monkeypatch: pytest.MonkeyPatch, place: Path, name: str, system: str) -> None:
    """A torch whose library has the name that it has on another system."""
    import torch

    from qkv.bridges.torch import openmp as torch_openmp

    (library,) = Path(torch.__file__).parent.joinpath("lib").glob("libtorch_cpu.so*")
    (place / "lib").mkdir()
    (place / "lib" / name).symlink_to(library)
    monkeypatch.setattr(torch, "__file__", str(place / "__init__.py"))
    monkeypatch.setattr(sys, "platform", system)
    torch_openmp.torch_openmp.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="a library of Linux stands for the others'")
def test_torch_s_threads_are_found_on_macos(monkeypatch, tmp_path) -> None:
    from qkv.bridges.torch.openmp import torch_openmp

    here = torch_openmp()
    linked_as(monkeypatch, tmp_path, "libtorch_cpu.dylib", "darwin")
    try:
        assert here is not None
        assert torch_openmp() == here
    finally:
        torch_openmp.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="a library of Linux stands for the others'")
def test_torch_s_threads_are_left_alone_on_windows(monkeypatch, tmp_path) -> None:
    """torch's OpenMP library there lacks the functions of GNU's, and `os` has no RTLD_NOLOAD."""
    from qkv.bridges.torch.openmp import torch_openmp

    linked_as(monkeypatch, tmp_path, "torch_cpu.dll", "win32")
    for name in ("RTLD_LAZY", "RTLD_NOLOAD"):
        monkeypatch.delattr(os, name)
    try:
        assert torch_openmp() is None
    finally:
        torch_openmp.cache_clear()
