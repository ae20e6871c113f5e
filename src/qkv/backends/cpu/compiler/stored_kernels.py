"""Machine code of kernels on disk, in a private folder of the user.

A file there is used only when it is ours and its digest is right; whatever goes wrong with the
folder only costs a compilation. Its name is a digest of what the code is made from: the function
that emits it and what that is given, the source text of whatever emits, the compiler and the
machine. So nothing is emitted to find it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkv.backends.cpu.compiler.canonical import canonical
from qkv.backends.cpu.machine.host import Host
from qkv.errors import KernelCacheWarning

__all__ = [
    "KEPT_FILES", "cache_folder", "digest", "emitter_files", "kernel_files", "private_folder",
    "read_kernel", "write_kernel",
]  # fmt: skip

_MAGIC = b"qkv object 2\n"
_DIGEST = 32

KEPT_FILES = 2000
"""Kernels that the folder keeps, about 30 KB each; the least recently used go first."""
_KERNEL_NAME = re.compile(r"[0-9a-f]{64}|new-\w+")
"""The name of a finished file is a digest; a file that was never finished begins with "new-"."""


def cache_folder() -> Path | None:
    """`QKV_CACHE_DIR`, or the user's cache folder; None when it is set but empty."""
    folder = os.environ.get("QKV_CACHE_DIR")
    if folder is not None:
        return Path(folder) if folder else None
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        root = Path(base) if base else Path.home() / "AppData" / "Local"
        return root / "qkv" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "qkv"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "qkv"


def digest(emit: Callable[..., str], arguments: tuple[Any, ...], host: Host) -> str | None:
    """The name of the file; None when the sources cannot be read, and nothing is kept."""
    if _SOURCES is None:
        return None
    import llvmlite
    import llvmlite.binding as llvm

    versions = (llvmlite.__version__, llvm.llvm_version_info, llvm.get_process_triple())
    made_from = (emit.__module__, emit.__qualname__, arguments, host, versions, _SOURCES)
    return hashlib.sha256(canonical(made_from).encode()).hexdigest()


EMITTERS = (
    "backends/cpu/emit", "backends/cpu/products", "backends/cpu/forward", "backends/cpu/decode",
    "backends/cpu/backward", "backends/cpu/replay", "backends/cpu/split_bf16", "backends/cpu/rows",
    "backends/cpu/bf16_tiles",
    "backends/cpu/python_calls/code.py",
    "backends/cpu/threads/floating_mode.py", "backends/cpu/threads/gate.py",
    "backends/cpu/threads/openmp_code.py", "backends/cpu/threads/pool_code.py",
    "backends/cpu/compiler/compile.py", "backends/cpu/machine/tiling.py",
    "problem/language/bounds.py", "problem/language/derivative.py",
    "problem/language/expressions.py", "problem/language/intervals.py",
    "problem/language/nodes.py",
    "problem/philox.py", "problem/spec.py", "problem/stored_rows.py", "problem/tiles.py",
)  # fmt: skip
"""The folders and files, below the package `qkv`, whose text decides what code is emitted."""


def emitter_files(package: Path) -> list[Path]:
    """All files of `EMITTERS`, at any depth, for the package `qkv` at this path.

    Raises
    ------
    OSError
        If one of them is not there as source text.
    """
    all_files: list[Path] = []
    for name in EMITTERS:
        place = package / name
        files = sorted(place.rglob("*.py")) if place.suffix != ".py" else [place]
        if not files:
            raise FileNotFoundError(place)
        all_files += files
    return all_files


def _source_digest() -> str | None:
    """One number for the text of everything that emits code; None if it cannot be read."""
    package = Path(__file__).parents[3]
    total = hashlib.sha256()
    try:
        for file in emitter_files(package):
            total.update(f"{file.relative_to(package)} ".encode())
            total.update(hashlib.sha256(file.read_bytes()).digest())
    except OSError:
        return None
    return total.hexdigest()


_SOURCES = _source_digest()
"""Computed when this module is imported, because files may be edited while a process runs."""


def _readable_folder() -> Path | None:
    """The cache folder, made if need be; None unless it is ours and nobody else may write to it."""
    return private_folder()[0]


def private_folder() -> tuple[Path | None, str]:
    """The cache folder, None if it is off or not ours alone, and why kernels are not kept there.

    The reason is empty where they are kept, or where the cache is off.
    """
    try:
        folder = cache_folder()
        if folder is None:
            return None, ""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder.stat()):
            return None, f"{folder} is another user's, or others may write to it"
        if not os.access(folder, os.W_OK | os.X_OK):
            return folder, f"{folder} may not be written to"
    except (OSError, RuntimeError) as error:
        return None, _describe_error(error)
    return folder, ""


def _describe_error(error: Exception) -> str:
    """What went wrong, without the number that the system gives it."""
    if isinstance(error, FileExistsError) and error.filename:
        return f"{error.filename} is not a folder"
    words = getattr(error, "strerror", None) or str(error)
    path = getattr(error, "filename", None)
    return f"{path}: {words}" if path else words


def _warn_once(fault: str) -> None:
    """Say that kernels are not kept, in the first call that finds out."""
    if _faults:
        return
    _faults.append(fault)
    warnings.warn(
        f"compiled kernels cannot be kept, so that every process compiles them again: {fault}. "
        "Set QKV_CACHE_DIR to a folder of your own, or to nothing if none is wanted.",
        KernelCacheWarning,
        stacklevel=2,
    )


_faults: list[str] = []
"""The faults that this process has warned of."""


def _is_private(status: os.stat_result) -> bool:
    """Whether a file or folder is ours and only we may write to it.

    On Windows, `stat` says neither; there the folder is trusted as whoever named it does. By
    default it lies in the user's profile, which other users may not write to.
    """
    if not hasattr(os, "getuid"):
        return True
    others_write = stat.S_IMODE(status.st_mode) & 0o022
    return status.st_uid == os.getuid() and not others_write


def read_kernel(name: str | None) -> bytes | None:
    folder = _readable_folder()
    if folder is None or name is None:
        return None
    try:
        with open(folder / name, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not _is_private(status):
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


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting for the writer, if it is a named pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def write_kernel(name: str | None, code: bytes) -> None:
    folder, fault = private_folder()
    temporary = None
    if folder is not None and name is not None:
        try:
            handle, temporary = tempfile.mkstemp(dir=folder, prefix="new-")
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(name.encode() + code).digest() + code)
            os.replace(temporary, folder / name)
            _forget_oldest(folder)
        except OSError as error:
            # Windows replaces no file that is open. Whoever reads it has the same kernel from it.
            if not isinstance(error, PermissionError) or read_kernel(name) is None:
                fault = _describe_error(error)
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
    if fault:
        _warn_once(fault)


def kernel_files(folder: Path) -> list[Path]:
    """The files that `write_kernel` made; the folder may hold other files of its owner."""
    return [file for file in folder.iterdir() if _KERNEL_NAME.fullmatch(file.name)]


def _forget_oldest(folder: Path) -> None:
    files = kernel_files(folder)
    if len(files) <= KEPT_FILES:
        return
    used = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # Another process has just deleted it.
            used.append((file.stat().st_mtime, file))
    for _, file in sorted(used)[: max(0, len(used) - KEPT_FILES)]:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            file.unlink()  # Windows deletes no file that another process reads.
