"""The OpenMP threads that torch computes with, for calls that bring its tensors."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

import torch

from qkv.process.forks import is_forked
from qkv.process.openmp import OpenMP, caller

__all__ = ["on_torch_threads", "torch_openmp"]


@cache
def torch_openmp() -> OpenMP | None:
    """The functions of torch's OpenMP library, None if it has none that are called as GNU's are.

    A forked process has none of its threads. On Windows the library is Microsoft's or Intel's,
    neither of which has the functions of GNU's there.
    """
    if sys.platform == "win32" or is_forked() or not torch.backends.openmp.is_available():
        return None
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so*"
    # What torch was linked with is found through torch's own library, and not another copy.
    for library in Path(torch.__file__).parent.joinpath("lib").glob(name):
        try:
            loaded = ctypes.CDLL(str(library), mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
            names = "GOMP_parallel", "omp_get_thread_num", "omp_get_max_threads"
            addresses = [ctypes.cast(getattr(loaded, n), ctypes.c_void_p).value or 0 for n in names]
        except (OSError, AttributeError):
            continue
        return OpenMP(*addresses)
    return None


class on_torch_threads:
    """A context in which compiled code may run on torch's threads.

    A class, because a generator would take a tenth of a small call.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = caller.openmp
        caller.openmp = torch_openmp()

    def __exit__(self, *error: object) -> None:
        caller.openmp = self._before
