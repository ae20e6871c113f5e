"""Which machine it was, and whether it was quiet."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import qkv
from qkv.errors import ArgumentError

__all__ = ["describe", "load_average", "version_of"]

_PACKAGES = ("numpy", "llvmlite", "torch", "onnxruntime", "openvino", "jax")


def describe() -> dict[str, Any]:
    """Processor, instruction set, caches, system, versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "isa": _isa(),
        "caches": _caches(),
        "memory_bytes": _memory(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "qkv": qkv.__version__,
        "packages": {name: found for name in _PACKAGES if (found := version_of(name))},
    }


def load_average() -> float:
    """Processes that wanted to run in the last minute; 0 where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _isa() -> str:
    """What matters of it to a matrix product."""
    try:
        from qkv.backends.cpu.machine.host import host

        here = host()
    except (ImportError, OSError, ArgumentError) as error:
        return f"unknown: {error}"
    features = {name[1:] for name in here.features.split(",") if name.startswith("+")}
    extra = sorted(features & {"avx512bf16", "avx512fp16", "amx-bf16", "avx512vnni", "f16c"})
    return ", ".join([here.isa, *extra])


def _caches() -> dict[str, str]:
    """The caches of one core, from the system's description of it."""
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = (
                (folder / f).read_text().strip() for f in ("level", "type", "size")
            )
        except OSError:
            continue
        if kind != "Instruction":
            found[f"L{level}"] = size
    return found


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
