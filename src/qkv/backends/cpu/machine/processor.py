"""What LLVM says of this processor, kept on the disk so that LLVM need not be loaded for it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from qkv.backends.cpu.machine import stored_files
from qkv.process.forks import alone_in_llvm

__all__ = ["Processor", "processor"]

_MODALIAS = Path("/sys/devices/system/cpu/modalias")
"""The processor's family, its model and the numbers of all features that Linux lets be used."""


@dataclass(frozen=True)
class Processor:
    """A processor and the compiler that described it.

    Attributes
    ----------
    cpu : str
        The name by which LLVM knows it.
    features : dict of str to bool
        Whether it has each feature; empty on platforms where LLVM cannot list them.
    triple : str
        The target of code for this process.
    llvm, llvmlite : str
        The compiler's versions.
    """

    cpu: str
    features: dict[str, bool]
    triple: str
    llvm: str
    llvmlite: str


@lru_cache(maxsize=1)
def processor() -> Processor:
    """This processor, from the disk if it was described there.

    Raises
    ------
    ImportError, OSError
        If llvmlite cannot be loaded.
    """
    name = _record_name()
    stored = stored_files.read_file(name)
    if stored is not None:
        return Processor(**json.loads(stored))
    described = _ask_llvm()
    if name is not None:
        stored_files.write_file(name, json.dumps(asdict(described)).encode())
    return described


@alone_in_llvm()
def _ask_llvm() -> Processor:
    import llvmlite
    import llvmlite.binding as llvm

    try:
        features = dict(llvm.get_host_cpu_features())
    except RuntimeError:  # On some platforms LLVM cannot list the processor's features.
        features = {}
    version = ".".join(map(str, llvm.llvm_version_info))
    triple = llvm.get_process_triple()
    return Processor(llvm.get_host_cpu_name(), features, triple, version, llvmlite.__version__)


def _record_name() -> str | None:
    """The name of the record: a digest of what the description follows from.

    None where that is not known without LLVM, which is everywhere but on Linux with x86.
    """
    if sys.platform != "linux":
        return None
    import llvmlite

    library = Path(llvmlite.__file__).parent / "binding" / "libllvmlite.so"
    try:
        seen, file = _MODALIAS.read_text(), library.stat()
    except OSError:
        return None
    # An emulated process sees the files of a machine of another kind.
    if not seen.startswith("cpu:type:x86") or platform.machine() != "x86_64":
        return None
    compiler = (llvmlite.__version__, file.st_size, file.st_mtime_ns)
    text = f"processor {seen} {os.uname().release} {compiler}"
    return f"processor-{hashlib.sha256(text.encode()).hexdigest()}"
