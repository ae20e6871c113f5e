"""LLVM IR to machine code, once for each kernel and machine.

Machine code is kept on disk in a private folder of the user. A file there is used only when it is
ours and its digest is right; whatever goes wrong with the folder only costs a compilation.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import stat
import sys
import tempfile
import threading
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.backends.cpu.host import Host
from qkv.errors import KernelBuildError

if TYPE_CHECKING:
    from qkv.backends.cpu.arguments import Arguments

_MAGIC = b"qkv object 1\n"
_DIGEST = 32

KEPT_FILES = 1000
"""Kernels that the folder keeps, about 30 KB each; the least recently used go first."""


_Job = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


class Kernel:
    """Machine code in memory."""

    def __init__(self, code: bytes, host: Host) -> None:
        import llvmlite.binding as llvm

        empty = llvm.parse_assembly("")
        self._engine = llvm.create_mcjit_compiler(empty, _machine(host))
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        address = int(self._engine.get_function_address("job"))
        if not address:
            raise RuntimeError("the object has no function job")
        self._job = _Job(address)

    def run(self, arguments: Arguments, worker: int) -> None:
        """Take tasks until none is left; Python's lock is free meanwhile."""
        self._job(arguments.address, worker)


_lock = threading.Lock()


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    # Another thread of the parent may have been compiling.
    os.register_at_fork(after_in_child=_new_lock)


def build(source: str, host: Host) -> Kernel:
    """Machine code for a module with a function `job`.

    Raises
    ------
    KernelBuildError
        If LLVM refuses the module or the machine.
    """
    try:
        with _lock:
            name = _digest(source, host)
            stored = _read(name)
            if stored is not None:
                return Kernel(stored, host)
            code = _compile(source, host)
            kernel = Kernel(code, host)
    except (RuntimeError, OSError, MemoryError) as error:
        raise KernelBuildError(
            "the compiled kernel could not be made.",
            [("machine", f"{host.cpu}, {host.isa}"), ("LLVM", str(error)[:500])],
            'Pass backend="blocked", which needs no compiler, and report this.',
        ) from error
    _write(name, code)
    return kernel


@lru_cache(maxsize=1)
def _initialize() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _machine(host: Host) -> Any:
    import llvmlite.binding as llvm

    _initialize()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=host.cpu, features=host.features, opt=2, jit=True)


def _compile(source: str, host: Host) -> bytes:
    module, machine = optimized(source, host)
    return bytes(machine.emit_object(module))


def optimized(source: str, host: Host) -> tuple[Any, Any]:
    """The module after LLVM's passes, and the machine it is for."""
    import llvmlite.binding as llvm

    machine = _machine(host)
    module = llvm.parse_assembly(source)
    module.triple = llvm.get_process_triple()
    module.data_layout = str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    # The kernels are vectors already; unrolling them further only takes time and registers.
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module, machine


# The cache on disk


def cache_folder() -> Path | None:
    """`QKV_CACHE_DIR`, or the user's cache folder; None when it is set but empty."""
    said = os.environ.get("QKV_CACHE_DIR")
    if said is not None:
        return Path(said) if said else None
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        root = Path(base) if base else Path.home() / "AppData" / "Local"
        return root / "qkv" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "qkv"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "qkv"


def _digest(source: str, host: Host) -> str:
    import llvmlite
    import llvmlite.binding as llvm

    versions = (llvmlite.__version__, str(llvm.llvm_version_info), llvm.get_process_triple())
    parts = (*versions, host.cpu, host.features, source)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _private_folder() -> Path | None:
    """The folder, made if need be; None unless it is ours and nobody else may write to it."""
    try:
        folder = cache_folder()
        if folder is None:
            return None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_private(folder.stat()) else None
    except (OSError, RuntimeError):
        return None


def _is_private(status: os.stat_result) -> bool:
    if not hasattr(os, "getuid"):
        return True
    others_write = stat.S_IMODE(status.st_mode) & 0o022
    return status.st_uid == os.getuid() and not others_write


def _read(name: str) -> bytes | None:
    folder = _private_folder()
    if folder is None:
        return None
    try:
        with open(folder / name, "rb") as file:
            if not _is_private(os.fstat(file.fileno())):
                return None
            content = file.read()
            with contextlib.suppress(OSError):
                os.utime(folder / name)
    except OSError:
        return None
    start = len(_MAGIC) + _DIGEST
    code = content[start:]
    if content[:start] != _MAGIC + hashlib.sha256(name.encode() + code).digest():
        return None
    return code


def _write(name: str, code: bytes) -> None:
    folder = _private_folder()
    if folder is None:
        return
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=folder, prefix="new-")
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(name.encode() + code).digest() + code)
        os.replace(temporary, folder / name)
        _forget_oldest(folder)
    except OSError:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _forget_oldest(folder: Path) -> None:
    files = list(folder.iterdir())
    if len(files) <= KEPT_FILES:
        return
    used = sorted((file.stat().st_mtime, file) for file in files)
    for _, file in used[: len(files) - KEPT_FILES]:
        file.unlink(missing_ok=True)
