"""Machines for the roofline: their peak operations and bytes per second."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import NamedTuple

from qkv import get_num_threads
from qkv.arguments.declarations import checked, shown
from qkv.arguments.spelling import did_you_mean
from qkv.count import Amount
from qkv.errors import ArgumentError, KernelBuildError, UnsupportedError

__all__ = ["DTYPE_BYTES", "Machine", "Roofline", "bytes_of", "machine", "machine_names"]

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1,
}  # fmt: skip
"""Bytes of one number, for each dtype whose cost can be computed."""

_BEYOND_CACHES = 2**29
"""Bytes that are read to measure this machine's memory."""


@checked
def bytes_of(dtype: str) -> int:
    """Bytes of a number.

    Parameters
    ----------
    dtype : str
        One of `DTYPE_BYTES`.

    Raises
    ------
    ArgumentError
        If it is not.
    """
    if dtype not in DTYPE_BYTES:
        raise ArgumentError(
            f"dtype={shown(dtype)} is not a type whose cost is counted.",
            [("types", ", ".join(DTYPE_BYTES))],
            "Choose one of these.",
        )
    return DTYPE_BYTES[dtype]


class Roofline(NamedTuple):
    """The least time that a machine needs: `max(operations / peak, bytes / bandwidth)`.

    Attributes
    ----------
    seconds : float
    bound : str
        "operations" or "memory": which of the two takes longer.

    Examples
    --------
    >>> from qkv.cost import machine
    >>> machine("h100").roofline(10**9, 10**12, "bfloat16").bound
    'memory'
    """

    seconds: float
    bound: str


@checked
@dataclass(frozen=True, slots=True)
class Machine:
    """The peak operations and bandwidth of a machine.

    Attributes
    ----------
    name : str
    peak : dict of str to float
        Operations a second by dtype, a multiply-add counted as two.
    bandwidth : float
        Bytes a second between memory and processor.
    source : str
        Where the numbers come from.
    estimated : bool
        Whether the peak is computed from other numbers because its maker publishes none.

    Examples
    --------
    >>> from qkv.cost import Machine
    >>> mine = Machine("mine", {"float32": 1e12}, 1e11, "its data sheet")
    >>> mine.roofline(2 * 10**12, 10**11, "float32")
    Roofline(seconds=2.0, bound='operations')
    """

    name: str
    peak: Mapping[str, float]
    bandwidth: float
    source: str
    estimated: bool = False

    def roofline(self, operations: Amount, bytes_moved: Amount, dtype: str) -> Roofline | None:
        """The least time for so many operations and bytes; None without a peak for the dtype.

        Parameters
        ----------
        operations, bytes_moved : int
        dtype : str

        Notes
        -----
        Source: Williams, Waterman, Patterson (2009), "Roofline".

        Examples
        --------
        >>> from qkv.cost import machine
        >>> machine("h100").roofline(10**15, 10**9, "bfloat16").bound
        'operations'
        """
        if dtype not in self.peak:
            return None
        computing, moving = operations / self.peak[dtype], bytes_moved / self.bandwidth
        return Roofline(max(computing, moving), "operations" if computing >= moving else "memory")


def machine_names() -> tuple[str, ...]:
    """Names that `machine` knows; "here" is the machine on which this runs.

    Examples
    --------
    >>> from qkv.cost import machine_names
    >>> "h100" in machine_names()
    True
    """
    return (*_described(), "here")


@checked
def machine(name: str) -> Machine:
    """A machine by its name.

    Parameters
    ----------
    name : str
        One of `machine_names()`. "here" measures this machine, which takes a few seconds: its
        multiply-adds and its reading of memory, as the benchmark does.

    Raises
    ------
    ArgumentError
        If no machine has that name.
    UnsupportedError
        If this machine cannot be measured: llvmlite is not installed, or the system refuses
        executable memory.

    Examples
    --------
    >>> from qkv.cost import machine
    >>> machine("h200").bandwidth
    4800000000000.0
    """
    if name == "here":
        return _measured(get_num_threads())
    if name not in _described():
        raise ArgumentError(
            f"no machine is called {shown(name)}.",
            [("machines", ", ".join(machine_names()))],
            f"{did_you_mean(name, machine_names())}Name one of these.",
        )
    return _described()[name]


@cache
def _described() -> dict[str, Machine]:
    text = resources.files("qkv.cost").joinpath("machines.json").read_text(encoding="utf-8")
    return {name: Machine(**fields) for name, fields in json.loads(text).items()}


@cache
def _measured(threads: int) -> Machine:
    try:
        from qkv.cost.peaks import product_ceiling, read_ceiling

        peak = {
            kind: product_ceiling(kind, threads).measure()
            for kind in ("float64", "float32", "bfloat16")
        }
        bandwidth = read_ceiling(_BEYOND_CACHES, threads).measure()
    except ImportError as error:
        raise UnsupportedError(
            f"this machine cannot be measured: {error}.",
            action=f"Install llvmlite, or name one of {', '.join(_described())}.",
        ) from error
    except KernelBuildError as error:
        raise UnsupportedError(
            f"this machine cannot be measured: {error.fact}",
            list(error.seen),
            f"Name one of {', '.join(_described())}.",
        ) from error
    # The kernels convert float16 to float32 before arithmetic.
    peak["float16"] = peak["float32"]
    return Machine("this machine", peak, bandwidth, f"measured just now with {threads} threads")
