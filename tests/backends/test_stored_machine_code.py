"""Kernels that are put into memory without LLVM, and what is kept so that it need not be loaded."""

from __future__ import annotations

import ctypes
import gc
import platform
import sys

import llvmlite.binding as llvm
import numpy as np
import pytest

from processes import in_a_process
from qkv.backends.cpu.compiler import compile as cpu_compile
from qkv.backends.cpu.compiler import elf_object, stored_kernels
from qkv.backends.cpu.emit.structured_code import INT64, StructuredCode
from qkv.backends.cpu.machine import processor as described
from qkv.backends.cpu.machine import stored_files
from qkv.backends.cpu.machine.host import host

is_linux_on_x86 = sys.platform == "linux" and platform.machine() == "x86_64"
on_linux_on_x86 = pytest.mark.skipif(not is_linux_on_x86, reason="elsewhere LLVM links")

SOURCE = """
@table = private constant [4 x i64] [i64 2, i64 3, i64 5, i64 7]
@state = internal global i64 40
@zeros = internal global [3 x i64] zeroinitializer
@place = internal global ptr @state
declare i32 @sched_yield()

define i64 @prime(i64 %n) {
  %at = getelementptr i64, ptr @table, i64 %n
  %value = load i64, ptr %at
  ret i64 %value
}

define i64 @counted() {
  %place = load ptr, ptr @place
  %before = load i64, ptr %place
  %after = add i64 %before, 1
  store i64 %after, ptr %place
  %zero = getelementptr i64, ptr @zeros, i64 2
  %more = load i64, ptr %zero
  %sum = add i64 %after, %more
  ret i64 %sum
}

define i64 @yielded() {
  %result = call i32 @sched_yield()
  %wide = sext i32 %result to i64
  ret i64 %wide
}
"""
"""Constants, variables with and without a first value, an address in a variable, and a function of
the system."""
NAMES = ("prime", "counted", "yielded")


def function(code, name: str, *types):
    return ctypes.CFUNCTYPE(ctypes.c_int64, *types)(code.address(name))


@on_linux_on_x86
def test_linked_code_does_what_its_source_says() -> None:
    code = elf_object.load([cpu_compile._compile(SOURCE, host())], NAMES)
    assert isinstance(code, elf_object.ElfObject)
    prime = function(code, "prime", ctypes.c_int64)
    assert [prime(n) for n in range(4)] == [2, 3, 5, 7]
    counted = function(code, "counted")
    assert [counted(), counted(), counted()] == [41, 42, 43]
    assert function(code, "yielded")() == 0


CALLER = """
@factor = internal global i64 3
declare i64 @square(i64)
define i64 @job(i64 %n) {
  %square = call i64 @square(i64 %n)
  %factor = load i64, ptr @factor
  %product = mul i64 %square, %factor
  ret i64 %product
}
"""
CALLED = """
@factor = internal global i64 1
define internal i64 @job(i64 %n) {
  %factor = load i64, ptr @factor
  %product = mul i64 %n, %factor
  ret i64 %product
}
define i64 @square(i64 %n) {
  %own = call i64 @job(i64 %n)
  %square = mul i64 %own, %n
  ret i64 %square
}
"""
"""Two modules that are linked; what is internal has names of its own in each."""


@pytest.mark.parametrize("link", [elf_object.load, cpu_compile._LinkedByLLVM])
def test_a_module_calls_the_functions_of_another(link) -> None:
    objects = [cpu_compile._compile(source, host()) for source in (CALLER, CALLED)]
    if link is elf_object.load:
        code = link(objects, ("job",))
        assert (code is not None) == is_linux_on_x86
    else:
        code = link(objects, host(), ("job",))
    if code is not None:
        assert [function(code, "job", ctypes.c_int64)(n) for n in (2, 5)] == [12, 75]


def test_what_is_declared_is_what_is_written() -> None:
    code = StructuredCode("declared")
    written = StructuredCode("written")

    def square(into: StructuredCode):
        with into.function("square", [INT64], INT64) as (function, args):
            into.builder.ret(into.mul(args[0], args[0]))
        return function

    declaration, definition = code.declared(square, code), square(written)
    assert declaration.function_type == definition.function_type
    assert "define" not in str(code.module)
    assert 'declare i64 @"square"(i64' in str(code.module)
    assert 'define internal i64 @"square"(i64' in str(written.module)
    assert 'define external i64 @"square"(i64' in written.sharing([definition])
    with pytest.raises(TypeError, match="writes no function"):
        code.declared(lambda: None)


@on_linux_on_x86
def test_code_may_not_be_written_and_variables_not_executed() -> None:
    """Code and variables are private: a forked child has variables of its own."""
    code = elf_object.load([cpu_compile._compile(SOURCE, host())], NAMES)
    assert code is not None
    allowed = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, rights, *_ = line.split()
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= code.address("prime") < last:
                allowed["code"], end = rights, last
            elif allowed and first == end:
                allowed["variables"], end = rights, 0
    assert allowed == {"code": "r-xp", "variables": "rw-p"}


@on_linux_on_x86
def test_memory_is_given_back_with_the_code() -> None:
    code = elf_object.load([cpu_compile._compile(SOURCE, host())], NAMES)
    assert code is not None
    address = code.address("prime")

    def is_mapped() -> bool:
        with open("/proc/self/maps") as maps:
            spans = [line.split()[0].split("-") for line in maps if " r-xp " in line]
        return any(int(first, 16) <= address < int(last, 16) for first, last in spans)

    assert is_mapped()
    del code
    gc.collect()
    assert not is_mapped()


OTHERS = {
    "an unknown function": "declare void @nobody_has_this()\ndefine void @job() {\n"
    " call void @nobody_has_this()\n ret void\n}",
    "no such name": "define void @other() {\n ret void\n}",
    "a variable of each thread": "@x = thread_local global i64 0\ndefine ptr @job() {\n"
    " %p = call ptr @llvm.threadlocal.address.p0(ptr @x)\n ret ptr %p\n}\n"
    "declare ptr @llvm.threadlocal.address.p0(ptr)",
}


@pytest.mark.parametrize("source", OTHERS.values(), ids=OTHERS)
def test_what_is_not_understood_is_left_to_llvm(source) -> None:
    assert elf_object.load([cpu_compile._compile(source, host())], ("job",)) is None


def test_objects_for_other_systems_are_left_to_llvm() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for triple in ("aarch64-unknown-linux-gnu", "x86_64-pc-windows-msvc", "x86_64-apple-darwin"):
        there = llvm.Target.from_triple(triple).create_target_machine(opt=2, jit=True)
        module = cpu_compile.parsed_for("define void @job() {\n ret void\n}", there, triple)
        assert elf_object.load([bytes(there.emit_object(module))], ("job",)) is None
    assert elf_object.load([b""], ("job",)) is None


def test_the_kept_description_is_that_of_llvm(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path))
    expected = described._ask_llvm()
    assert expected.cpu == llvm.get_host_cpu_name()
    assert expected.triple == llvm.get_process_triple()
    for _ in range(2):
        described.processor.cache_clear()
        assert described.processor() == expected
    kept = [file.name for file in tmp_path.iterdir()]
    assert all(name.startswith("processor-") for name in kept)
    assert len(kept) == is_linux_on_x86
    assert stored_files.kernel_files(tmp_path) == []


@on_linux_on_x86
def test_another_processor_or_compiler_is_described_anew(tmp_path, monkeypatch) -> None:
    """A home folder may be shared by machines, and an environment gets another llvmlite."""
    import llvmlite

    names = {described._record_name()}
    monkeypatch.setattr(llvmlite, "__version__", "0")
    names.add(described._record_name())
    text = described._MODALIAS.read_text()
    for other in ("", text.replace("cpu:type:x86", "cpu:type:aarch64"), text + "0FFF"):
        (tmp_path / "modalias").write_text(other)
        monkeypatch.setattr(described, "_MODALIAS", tmp_path / "modalias")
        names.add(described._record_name())
    assert len(names) == 4
    assert None in names


SCRIPT = """
import os, sys
os.environ["QKV_CACHE_DIR"] = {folder!r}
import numpy as np
import qkv
x = np.ones((1, 2, 64, 32), np.float32)
out = qkv.attention(x, x, x, qkv.Causal(), backend="cpu", q_offset="end")
step = qkv.attention(x[:, :, :1], x, x, qkv.RoPE(), backend="cpu", q_offset="end")
result, pullback = qkv.vjp(x, x, x, backend="cpu")
pullback(result)
np.testing.assert_allclose(out, x, rtol=1e-6)
np.testing.assert_allclose(step, x[:, :, :1], rtol=1e-6)
assert ("llvmlite.binding" in sys.modules) == {first}, "LLVM"
assert ("llvmlite.ir" in sys.modules) == {first}, "emitters"
"""


@on_linux_on_x86
@pytest.mark.slow
def test_a_process_whose_kernels_are_kept_loads_no_compiler(tmp_path) -> None:
    for first in (True, False):
        in_a_process(SCRIPT.format(folder=str(tmp_path), first=first))


def test_sources_that_look_the_same_are_read_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(stored_kernels, "_SETTLED", -1.0)
    expected = stored_kernels._source_digest()
    (record,) = tmp_path.iterdir()
    assert record.name.startswith("sources-")
    read = []
    monkeypatch.setattr(stored_kernels.Path, "read_bytes", lambda file: read.append(file))
    assert stored_kernels._source_digest() == expected
    assert read == []


def test_sources_that_changed_a_moment_ago_are_not_trusted(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(stored_kernels, "_SETTLED", np.inf)
    assert stored_kernels._source_digest() is not None
    assert list(tmp_path.iterdir()) == []


def test_every_emit_function_is_there() -> None:
    """Emit functions are named by texts, which no type checker reads."""
    from importlib import import_module
    from pathlib import Path

    import qkv

    package = Path(qkv.__file__).parent
    found = 0
    for file in (package / "backends" / "cpu").rglob("*.py"):
        parts = (".".join(file.relative_to(package.parent).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        if "EmitFunction(" not in file.read_text():
            continue
        for value in vars(import_module(parts)).values():
            emit = getattr(value, "emit", value)
            if isinstance(emit, cpu_compile.EmitFunction):
                found += 1
                assert callable(getattr(import_module(emit.module), emit.name))
    assert found >= 16
