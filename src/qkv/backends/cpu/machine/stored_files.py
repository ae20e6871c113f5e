"""Files in a private folder of the user, from which a process learns what an earlier one found.

They hold the machine code of kernels, and what LLVM says of the processor. The name of a file is a
digest of what its content follows from. A file is used only when it is ours and its own digest is
right; whatever goes wrong with the folder only costs the time to find the content again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
import warnings
from pathlib import Path

from qkv.errors import KernelCacheWarning

__all__ = [
    "KEPT_FILES", "cache_folder", "kernel_files", "private_folder", "read_file", "write_file",
]  # fmt: skip

_MAGIC = b"qkv file 3\n"
_DIGEST = 32

KEPT_FILES = 4000
"""Files that the folder keeps, about 14 KB each; the least recently used go first."""
_NAME = re.compile(r"([a-z]+-)?[0-9a-f]{64}|new-\w+")
"""The name of a file ends in a digest, which is all of the name of a kernel; a file that was never
finished begins with "new-"."""
_KERNEL_DIGITS = 64


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

    On Windows, `stat` says neither, and every folder is trusted. The default one lies in the user's
    profile, which other users may not write to.
    """
    if not hasattr(os, "getuid"):
        return True
    others_write = stat.S_IMODE(status.st_mode) & 0o022
    return status.st_uid == os.getuid() and not others_write


def read_file(name: str | None) -> bytes | None:
    """The content of a file; None if it is not there, or is not to be trusted."""
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
    kept = content[start:]
    if content[:start] != _MAGIC + hashlib.sha256(name.encode() + kept).digest():
        return None
    return kept


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting for the writer, if it is a named pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def write_file(name: str | None, content: bytes) -> None:
    """Keep a content under a name; a fault of the folder is warned of, once."""
    folder, fault = private_folder()
    temporary = None
    if folder is not None and name is not None:
        import tempfile  # It takes longer to import than all that a process with stored files does.

        try:
            handle, temporary = tempfile.mkstemp(dir=folder, prefix="new-")
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(name.encode() + content).digest() + content)
            os.replace(temporary, folder / name)
            _forget_oldest(folder)
        except OSError as error:
            # Windows replaces no file that is open. Whoever reads it has the same kernel from it.
            if not isinstance(error, PermissionError) or read_file(name) is None:
                # The error names a temporary file, or none where the disk is full.
                fault = f"{folder}: {error.strerror or error}"
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
    if fault:
        _warn_once(fault)


def kernel_files(folder: Path) -> list[Path]:
    """The kernels that are kept there."""
    return [file for file in _our_files(folder) if len(file.name) == _KERNEL_DIGITS]


def _our_files(folder: Path) -> list[Path]:
    """The files that `write_file` made; the folder may hold other files of its owner."""
    return [file for file in folder.iterdir() if _NAME.fullmatch(file.name)]


def _forget_oldest(folder: Path) -> None:
    files = _our_files(folder)
    if len(files) <= KEPT_FILES:
        return
    used = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # Another process has just deleted it.
            used.append((file.stat().st_mtime, file))
    for _, file in sorted(used)[: max(0, len(used) - KEPT_FILES)]:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            file.unlink()  # Windows deletes no file that another process reads.
