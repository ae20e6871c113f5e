"""The names under which the machine code of kernels is kept.

A name is a digest of what the code is made from: the function that emits it and what that is given,
the source text of whatever emits, the compiler and the machine. So nothing is emitted to find it.
"""

from __future__ import annotations

import hashlib
import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from qkv.backends.cpu.compiler.canonical import canonical
from qkv.backends.cpu.machine import stored_files
from qkv.backends.cpu.machine.host import Host
from qkv.backends.cpu.machine.processor import processor

__all__ = ["EMITTERS", "digest", "emitter_files"]


def digest(module: str, function: str, arguments: tuple[Any, ...], host: Host) -> str | None:
    """The name of the file; None when the sources cannot be read, and nothing is kept."""
    if _SOURCES is None:
        return None
    known = processor()
    compiler = (known.llvmlite, known.llvm, known.triple)
    same = _digest_of_machine(host, compiler, _SOURCES)
    return _digest((same, module, function, arguments))


@lru_cache(maxsize=8)
def _digest_of_machine(host: Host, compiler: tuple[str, ...], sources: str) -> str:
    """What is the same for all kernels of a process, which is long."""
    return _digest((host, compiler, sources))


def _digest(value: object) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()


EMITTERS = (
    "backends/cpu/emit", "backends/cpu/products", "backends/cpu/forward", "backends/cpu/decode",
    "backends/cpu/backward", "backends/cpu/replay", "backends/cpu/split_bf16", "backends/cpu/rows",
    "backends/cpu/bf16_pairs", "backends/cpu/bf16_tiles", "backends/cpu/tangents",
    "backends/cpu/python_calls/code.py", "backends/cpu/python_calls/layout.py",
    "backends/cpu/threads/floating_mode.py", "backends/cpu/threads/gate.py",
    "backends/cpu/threads/layout.py",
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
    """One number for the text of everything that emits code; None if it cannot be read.

    Reading all files takes longer than a short call, so the number is kept for files that have not
    changed. Files that changed a moment ago are read, since they may change again unnoticed.
    """
    package = Path(__file__).parents[3]
    try:
        files = emitter_files(package)
        name = _name_of_unchanged(files)
        stored = stored_files.read_file(name)
        if stored is not None:
            return stored.decode()
        total = hashlib.sha256()
        for file in files:
            total.update(f"{file.relative_to(package)} ".encode())
            total.update(hashlib.sha256(file.read_bytes()).digest())
    except OSError:
        return None
    if name is not None:
        stored_files.write_file(name, total.hexdigest().encode())
    return total.hexdigest()


def _name_of_unchanged(files: list[Path]) -> str | None:
    """The name under which the digest of files is kept while sizes, times and inodes stay."""
    seen = [os.stat(file) for file in files]
    latest = max(max(s.st_mtime, s.st_ctime) for s in seen)
    if abs(time.time() - latest) <= _SETTLED:
        return None
    state = [(s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev) for s in seen]
    return f"sources-{hashlib.sha256(f'{files} {state}'.encode()).hexdigest()}"


_SETTLED = 10.0
"""Seconds after which a file that is changed again has another time of change."""
_SOURCES = _source_digest()
"""Computed when this module is imported, because files may be edited while a process runs."""
