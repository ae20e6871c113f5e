"""Kernels for arm64, compiled on this side: LLVM takes twenty times as long under QEMU.

A process of the other machine sends the function that emits a kernel and its arguments when the
kernel is not in their common folder; this side emits and compiles it for the other triple, with the
same LLVM, and puts it there under the same name.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from functools import lru_cache
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from qkv.backends.cpu.compiler.compile import parsed_for
from qkv.backends.cpu.machine import stored_files
from qkv.backends.cpu.machine.host import Host


@lru_cache(maxsize=8)
def _machine(triple: str, cpu: str, features: str) -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple)
    return target.create_target_machine(cpu=cpu, features=features, opt=2, jit=True)


def _add_kernel(
    name: str, triple: str, module: str, function: str, arguments: tuple[Any, ...], host: Host
) -> None:
    emit = getattr(importlib.import_module(module), function)
    machine = _machine(triple, host.cpu, host.features)
    code = machine.emit_object(parsed_for(emit(*arguments), machine, triple))
    stored_files.write_file(name, bytes(code))


@contextlib.contextmanager
def compile_server(address: Path) -> Iterator[list[str]]:
    """Answer requests at a Unix socket meanwhile; the list has the name of each kernel made."""
    made: list[str] = []
    with Listener(str(address), "AF_UNIX", backlog=64) as listener:
        threading.Thread(target=_serve, args=(listener, made), daemon=True).start()
        yield made


def _serve(listener: Listener, made: list[str]) -> None:
    while True:
        try:
            connection = listener.accept()
        except OSError:  # The socket was closed.
            return
        with connection, contextlib.suppress(OSError):
            made += _answer(connection)


def _answer(connection: Connection) -> list[str]:
    """Make one kernel; what cannot be made here is compiled by the one who asked."""
    try:
        name, *request = connection.recv()
        _add_kernel(name, *request)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return []
    connection.send("")
    return [name]
