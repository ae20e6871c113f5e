"""What each Python process of the imitated machine does first.

Children are started through a script, because Linux cannot execute arm64 programs by itself; and
kernels are asked for from this side, as `kernels` says, once qkv's store of kernels is imported.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

STORE = "qkv.backends.cpu.compiler.stored_kernels"

sys.executable = os.environ["QKV_AARCH64_PYTHON"]


class StoreFinder(MetaPathFinder):
    """Finds the module of stored kernels, and changes it right after it was executed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != STORE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                ask_for_kernels(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def ask_for_kernels(store: Any) -> None:
    """Make the name of a kernel bring the kernel to the common folder, if it is used here."""
    digest = store.digest
    common = os.environ["QKV_CACHE_DIR"]

    def asked(module: str, function: str, arguments: tuple[Any, ...], host: Any) -> str | None:
        name: str | None = digest(module, function, arguments, host)
        used = os.environ.get("QKV_CACHE_DIR") == common and module.startswith("qkv.")
        if name and used and not os.path.exists(os.path.join(common, name)):
            ask(name, module, function, arguments, host)
        return name

    store.digest = asked


def ask(name: str, module: str, function: str, arguments: tuple[Any, ...], host: Any) -> None:
    """Wait until the kernel was made."""
    from multiprocessing.connection import Client

    import llvmlite.binding as llvm

    triple = llvm.get_process_triple()
    with Client(os.environ["QKV_AARCH64_COMPILER"], "AF_UNIX") as connection:
        try:
            connection.send((name, triple, module, function, arguments, host))
            fault = connection.recv()
        except Exception as error:  # Something that cannot be sent, or nobody who answers.
            fault = str(error)
    if fault:
        print(f"{function} is compiled under QEMU: {fault}", file=sys.stderr)


sys.meta_path.insert(0, StoreFinder())
