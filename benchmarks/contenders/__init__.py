"""Who runs a workload: a name, the package that it needs, and how it is prepared.

A contender turns a workload's arrays into its own library's once, outside the time, and gives back
a function that runs the workload, and one that reads the result as NumPy arrays.

A new one is an entry of `CONTENDERS` here, a function in the file of its library (`of_qkv`,
`of_torch`, `of_jax`, `of_onnxruntime`, `of_openvino`), and its name in
`benchmarks.problems.workloads`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from numpy.typing import NDArray

from benchmarks.problems.reference import Inputs
from benchmarks.problems.workloads import Workload
from benchmarks.running.machine import version_of
from qkv.errors import ArgumentError

Array = NDArray[Any]

__all__ = ["CONTENDERS", "Contender", "Prepared", "contender", "contenders_of"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A workload ready to be run over and over.

    Attributes
    ----------
    run : callable ()
        Runs it once; returns when the result is there.
    read : callable (result) -> mapping of str to array
        The result as (batch, heads, length, dim): "out", and gradients by what they are of.
    dtype : str, optional
        The type it computes in, if not the workload's.
    """

    run: Callable[[], Any]
    read: Callable[[Any], Mapping[str, Array]]
    dtype: str | None = None


Prepare: TypeAlias = Callable[[Workload, Inputs, int], Prepared]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run workloads.

    Attributes
    ----------
    name : str
        As reports show it.
    package : str
        What must be installed.
    module, function : str
        `function(workload, inputs, threads)` of `benchmarks.contenders.module` prepares it. It
        raises UnsupportedError for a workload that this way cannot say.
    environment : mapping
        Variables that must be set before its process starts; "{threads}" is filled in.
    known_as : str
        Its name in its own process, if that runs another revision of qkv.
    """

    name: str
    package: str
    module: str
    function: str = "prepare"
    environment: Mapping[str, str] = field(default_factory=dict)
    known_as: str = ""

    @property
    def version(self) -> str | None:
        """The version of the package; None if it is not installed."""
        return version_of(self.package)

    def prepare(self, workload: Workload, inputs: Inputs, threads: int) -> Prepared:
        """Arrays and settings, once."""
        module = importlib.import_module(f"benchmarks.contenders.{self.module}")
        prepare: Prepare = getattr(module, self.function)
        return prepare(workload, inputs, threads)


_QKV = {"QKV_NUM_THREADS": "{threads}"}
_OMP = {"OMP_NUM_THREADS": "{threads}", "MKL_NUM_THREADS": "{threads}"}
_XLA = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads={threads}",
    "NPROC": "{threads}",
}

CONTENDERS: tuple[Contender, ...] = (
    Contender("qkv", "qkv", "of_qkv", environment=_QKV),
    Contender("qkv torch", "torch", "of_qkv", "prepare_torch", {**_QKV, **_OMP}),
    Contender("qkv kernel", "qkv", "of_qkv", "prepare_kernel", _QKV),
    Contender("qkv kernel statistics", "qkv", "of_qkv", "prepare_kernel_statistics", _QKV),
    Contender("qkv avx2", "qkv", "of_qkv", environment={**_QKV, "QKV_ISA": "avx2"}),
    Contender("qkv avx512-bf16", "qkv", "of_qkv", environment={**_QKV, "QKV_ISA": "avx512-bf16"}),
    Contender("qkv bfloat16", "qkv", "of_qkv", "prepare_bfloat16", _QKV),
    Contender("qkv int8", "qkv", "of_qkv", "prepare_int8", _QKV),
    Contender("qkv statistics", "qkv", "of_qkv", "prepare_statistics", _QKV),
    Contender("qkv top 8", "qkv", "of_qkv", "prepare_top", _QKV),
    Contender("torch", "torch", "of_torch", environment=_OMP),
    Contender("torch packed", "torch", "of_torch", "prepare_packed", _OMP),
    Contender("torch flex", "torch", "of_torch", "prepare_flex", _OMP),
    Contender("onnxruntime", "onnxruntime", "of_onnxruntime"),
    Contender("onnxruntime gqa", "onnxruntime", "of_onnxruntime", "prepare_grouped"),
    Contender("openvino", "openvino", "of_openvino"),
    Contender("jax", "jax", "of_jax", environment=_XLA),
)


def contender(name: str) -> Contender:
    """The contender of this name.

    Raises
    ------
    ArgumentError
        If there is none.
    """
    for one in CONTENDERS:
        if one.name == name:
            return one
    raise ArgumentError(
        f"there is no contender {name!r}.",
        [("contenders", ", ".join(one.name for one in CONTENDERS))],
        "Use one of these.",
    )


def contenders_of(workload: Workload, packages: Sequence[str] = ()) -> tuple[Contender, ...]:
    """Who runs a workload: all, or the first and those of some packages."""
    first, *others = (contender(name) for name in workload.contenders)
    return (first, *(one for one in others if not packages or one.package in packages))
