"""The machine that code is compiled for: its instruction set, and how many threads may run.

`QKV_ISA` forces narrower vectors ("avx512", "avx2", "sse", "neon"), `QKV_NUM_THREADS` the number of
threads.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from qkv.backends.cpu.frame import Shape
from qkv.errors import ArgumentError

_SHAPES = {
    "avx512": Shape(lanes=16, vectors=4, keys=4, halves=True),
    "avx2": Shape(lanes=8, vectors=3, keys=4, halves=True),
    "sse": Shape(lanes=4, vectors=3, keys=4),
    "neon": Shape(lanes=4, vectors=4, keys=4, halves=True),
}
"""For float32."""
_REQUIRED = {
    "avx512": frozenset({"avx512f", "avx512vl", "avx512bw", "avx512dq", "fma", "f16c"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
}
_WIDE = ("avx512", "avx10", "amx")
"""Features that narrower code does without."""


@dataclass(frozen=True, slots=True)
class Host:
    """What the compiler is told, and the tile that fits the registers."""

    cpu: str
    features: str
    isa: str

    @property
    def shape(self) -> Shape:
        return _SHAPES[self.isa]

    def shape_of(self, dtype: np.dtype[Any]) -> Shape:
        """For a type of computation: float64 has half as many lanes."""
        shape = self.shape
        return shape if dtype.itemsize == 4 else replace(shape, lanes=shape.lanes // 2)


def host() -> Host:
    """This machine, or the narrower one that `QKV_ISA` names.

    Raises
    ------
    ArgumentError
        If `QKV_ISA` names an instruction set that this machine lacks.
    """
    return _host(os.environ.get("QKV_ISA", ""))


@lru_cache(maxsize=8)
def _host(forced: str) -> Host:
    import llvmlite.binding as llvm

    try:
        features = dict(llvm.get_host_cpu_features())
    except RuntimeError:  # LLVM cannot tell on every platform; the processor's name still says much
        features = {}
    has = {name for name, present in features.items() if present}
    if platform.machine().lower() in ("arm64", "aarch64"):
        usable = ["neon"]
    else:
        usable = [isa for isa, needs in _REQUIRED.items() if needs <= has] + ["sse"]
    isa = forced or usable[0]
    if isa not in usable:
        raise ArgumentError(
            f"QKV_ISA={forced!r} is not an instruction set of this machine.",
            [("has", ", ".join(usable))],
            "Unset QKV_ISA, or name one of these.",
        )
    if isa != usable[0]:
        dropped: tuple[str, ...] = _WIDE if isa == "avx2" else (*_WIDE, "avx", "fma", "f16c", "xop")
        for name in features:
            if name.startswith(dropped) or (isa == "sse" and name.startswith("v")):
                features[name] = False
    flat = ",".join(("+" if on else "-") + name for name, on in sorted(features.items()))
    return Host(llvm.get_host_cpu_name(), flat, isa)


def thread_limit() -> int:
    """How many threads may run: `QKV_NUM_THREADS`, or every core that the process may use.

    Raises
    ------
    ArgumentError
        If `QKV_NUM_THREADS` is not a whole number of 1 or more.
    """
    said = os.environ.get("QKV_NUM_THREADS", "")
    if not said:
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    if not said.isascii() or not said.isdigit() or not 1 <= int(said) <= 4096:
        raise ArgumentError(
            f"QKV_NUM_THREADS={said!r} is not a number of threads.",
            action="Unset it to use every core, or set a whole number from 1 to 4096.",
        )
    return int(said)
