"""LLVM IR to machine code, once for each kernel and machine, and its loading."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from qkv.backends.cpu.compiler import elf_object, stored_kernels
from qkv.backends.cpu.compiler.stack_probe import register_stack_probe
from qkv.backends.cpu.machine import executable_memory, stored_files
from qkv.backends.cpu.machine.host import Host
from qkv.errors import KernelBuildError
from qkv.process.forks import alone_in_llvm, compiling

_ROOM = 64 << 20
"""Bytes of address space that must be free before LLVM is called: without memory, LLVM ends the
whole process."""


class EmitFunction(NamedTuple):
    """A function of this package that gives the text of a module.

    It is named and not held, so that it is imported only where a module must be written. It depends
    on nothing but its arguments.
    """

    module: str
    name: str

    def __call__(self, *arguments: Any) -> str:
        # Not under the lock `importing`: a fork waits already until nobody is in LLVM, and would
        # wait for ever if it had one of the two locks and this thread the other.
        text: str = getattr(import_module(self.module), self.name)(*arguments)
        return text


class Module(NamedTuple):
    """A module, by the function that writes it and what that is given."""

    emit: EmitFunction
    arguments: tuple[Any, ...]


class Code(Protocol):
    """Machine code in memory."""

    def address(self, name: str) -> int:
        """The address of a function."""


class _LinkedByLLVM:
    """Machine code that LLVM put into memory."""

    def __init__(self, objects: Sequence[bytes], host: Host, names: tuple[str, ...]) -> None:
        import llvmlite.binding as llvm

        empty = llvm.parse_assembly("")
        # The engine deletes this machine when it goes.
        self._engine = llvm.create_mcjit_compiler(empty, _target_machine(host))
        # LLVM finds the last function of a name, even an internal one, and `names` are those of
        # the first object.
        for data in reversed(objects):
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        # An engine needs a module to begin with; compiling the empty one takes longer than linking.
        self._engine.remove_module(empty)
        self._engine.finalize_object()
        self._addresses = {name: int(self._engine.get_function_address(name)) for name in names}
        for name, address in self._addresses.items():
            if not address:
                raise RuntimeError(f"the object has no function {name}")

    def address(self, name: str) -> int:
        return self._addresses[name]


class Runnable(Protocol):
    """An argument block, which keeps alive whatever it points to."""

    @property
    def address(self) -> int: ...

    def allow_tasks(self, start: int, stop: int) -> None:
        """Let the next run take the tasks from `start` to `stop`."""


class Kernel:
    """A job, `job(arguments, worker)`: it takes tasks until none is left."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self.address = code.address("job")
        signature = None, ctypes.c_void_p, ctypes.c_int64
        self._job = ctypes.CFUNCTYPE(*signature)(self.address)
        self.brief_job = ctypes.PYFUNCTYPE(*signature)(self.address)
        """The same job without releasing Python's lock, for work as short as releasing the lock."""

    def run(self, arguments: Runnable, worker: int) -> None:
        """Run the job on this thread; Python's lock is free meanwhile."""
        self._job(arguments.address, worker)


def build(
    emit: EmitFunction,
    arguments: tuple[Any, ...],
    host: Host,
    names: tuple[str, ...] = ("job",),
    shared: tuple[Module, ...] = (),
) -> Code:
    """Machine code of the module `emit(*arguments)`, from the disk if it is there.

    Parameters
    ----------
    emit : EmitFunction
    arguments : tuple
        Values that `canonical` takes.
    host : Host
    names : tuple of str
        The functions of the module whose addresses are wanted.
    shared : tuple of Module
        Modules whose functions it calls; other modules may call them too, so they are compiled
        once.

    Raises
    ------
    KernelBuildError
        If LLVM refuses the module or the machine, or the system refuses executable memory.
    MemoryError
        If the process may not have the memory that LLVM needs.
    """
    with alone_in_llvm():
        _require_executable_memory(host)
        _require_room(_ROOM)
        modules = [Module(emit, arguments), *shared]
        places = [stored_kernels.digest(*m.emit, m.arguments, host) for m in modules]
        stored = [stored_files.read_file(name) for name in places]
        objects, errors = _objects(modules, stored, host)
        try:
            if errors:
                raise errors[0]
            code = linked(objects, host, names)
        except (RuntimeError, OSError) as error:
            if isinstance(error, OSError):
                # Where there is no memory to load LLVM itself, its error speaks of lost files.
                _require_room(_ROOM + _library_bytes())
            raise KernelBuildError(
                "the compiled kernel could not be made.",
                [("machine", f"{host.cpu}, {host.isa}"), ("LLVM", str(error)[:500])],
                'Pass backend="blocked", which needs no compiler, and report this.',
            ) from error
        for name, data, before in zip(places, objects, stored, strict=True):
            if before is None:
                stored_files.write_file(name, data)
    return code


def linked(objects: Sequence[bytes], host: Host, names: tuple[str, ...]) -> Code:
    """Object files that call one another, in memory, with the addresses of these functions."""
    return elf_object.load(objects, names) or _LinkedByLLVM(objects, host, names)


def _objects(
    modules: Sequence[Module], stored: Sequence[bytes | None], host: Host
) -> tuple[list[bytes], list[BaseException]]:
    """Machine code of these modules, stored or from LLVM, and what LLVM raised.

    A text takes a third as long to write as LLVM takes to compile it, so the next one is written
    meanwhile.
    """
    objects = {n: data for n, data in enumerate(stored) if data is not None}
    errors: list[BaseException] = []

    def compile_one(n: int, text: str) -> None:
        try:
            with compiling():
                objects[n] = _compile(text, host)
        except BaseException as error:
            errors.append(error)

    wait: Callable[[], None] | None = None
    try:
        # Shared modules come after the kernel in the list and are the longest, so they begin.
        for n in sorted(set(range(len(modules))) - set(objects), reverse=True):
            text = _text(*modules[n])
            if wait is not None:
                wait()
            wait = _begun(compile_one, n, text)
    finally:
        if wait is not None:
            wait()
    return [objects[n] for n in range(len(modules)) if n in objects], errors


def _begun(function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """Call a function in another thread. The result is a function that waits for its end."""
    thread = threading.Thread(target=function, args=arguments, name="qkv-compiler")
    try:
        thread.start()
    except RuntimeError:  # The process has as many threads as it may, or is about to end.
        function(*arguments)
        return lambda: None
    return thread.join


def _text(emit: EmitFunction, arguments: tuple[Any, ...]) -> str:
    """The text of a module. Python's collector of cycles waits meanwhile: the many small objects
    of a module would start it again and again, for a sixth of the time of a first call."""
    collects = gc.isenabled()
    try:
        gc.disable()
        return emit(*arguments)
    finally:
        if collects:
            gc.enable()


def _require_executable_memory(host: Host) -> None:
    refusal = executable_memory.refusal()
    if refusal:
        raise KernelBuildError(
            "the system refuses this process executable memory, which compiled code needs.",
            [("machine", f"{host.cpu}, {host.isa}"), ("system", refusal)],
            'Pass backend="blocked", which compiles nothing.',
        )


def _require_room(size: int) -> None:
    try:
        mmap.mmap(-1, size).close()  # The memory is reserved and never touched.
    except (OSError, MemoryError) as error:
        raise MemoryError(
            f"a kernel is compiled with up to {size >> 20} MiB, which this process may not have "
            '(ulimit -v). Free memory, or pass backend="blocked", which needs no compiler.'
        ) from error


def _library_bytes() -> int:
    """The size of LLVM's library, the largest file of its folder."""
    import llvmlite

    folder = Path(llvmlite.__file__).parent / "binding"
    return max((file.stat().st_size for file in folder.glob("*")), default=0)


@lru_cache(maxsize=1)
def _initialize() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    register_stack_probe()


def _target_machine(host: Host) -> Any:
    import llvmlite.binding as llvm

    _initialize()
    target = llvm.Target.from_default_triple()
    # Emulated kernels are for tests, which would wait longer for optimizations than for kernels.
    opt = 2 if host.emulated_on is None else 0
    return target.create_target_machine(cpu=host.cpu, features=host.features, opt=opt, jit=True)


def _compile(source: str, host: Host) -> bytes:
    module, machine = parsed(source, host)
    return bytes(machine.emit_object(module))


def parsed(source: str, host: Host) -> tuple[Any, Any]:
    """The module of a text, and the machine it is for."""
    import llvmlite.binding as llvm

    machine = _compiling_machine(host)
    return parsed_for(source, machine, llvm.get_process_triple()), machine


@lru_cache(maxsize=8)
def _compiling_machine(host: Host) -> Any:
    """What compiles for a machine, made once: its first module takes a millisecond longer."""
    return _target_machine(host)


def parsed_for(source: str, machine: Any, triple: str) -> Any:
    """The module of a text, for any machine that LLVM knows.

    None of LLVM's passes over modules is run. They took a sixth of a compilation, and kernels are
    no faster for them: they are written with vectors, with conditions of loops after their bodies,
    and without calls to inline.
    """
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(source)
    module.triple = triple
    module.data_layout = str(machine.target_data)
    module.verify()
    return module
