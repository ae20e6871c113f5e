"""The number of threads of compiled code: the set one, `QKV_NUM_THREADS`, or all cores."""

from __future__ import annotations

import math
import os
from functools import lru_cache
from pathlib import Path

from qkv._dynamo import ends_graph
from qkv.arguments.declarations import is_integer, shown
from qkv.errors import ArgumentError

__all__ = ["get_num_threads", "set_num_threads"]

MAX_THREADS = 4096
_DIGITS = 20
"""The largest number of digits that is converted; Python refuses thousands."""

_num_threads: int | None = None


@ends_graph
def set_num_threads(num_threads: int | None) -> None:
    """Choose how many threads compiled code uses, `1 <= num_threads <= 4096`, in this process.

    The bits of a result do not depend on it. It holds for calls that begin later, of all threads,
    and for children of a fork; with more threads than cores they get in each other's way. Calls
    that bring torch tensors run on the threads of torch's OpenMP, if these are no more.

    Parameters
    ----------
    num_threads : int or None
        None returns to `QKV_NUM_THREADS`, or every core that the process may use.

    Raises
    ------
    ArgumentError
        If it is not a whole number from 1 to 4096.

    Examples
    --------
    >>> import qkv
    >>> qkv.set_num_threads(1)
    >>> qkv.get_num_threads()
    1
    >>> qkv.set_num_threads(None)
    """
    global _num_threads
    if num_threads is None:
        _num_threads = None
        return
    if not is_integer(num_threads) or not 1 <= num_threads <= MAX_THREADS:
        raise ArgumentError(
            f"num_threads={shown(num_threads)} is not a number of threads.",
            action=f"Pass a whole number from 1 to {MAX_THREADS}, or None for the default.",
        )
    _num_threads = int(num_threads)


@ends_graph
def get_num_threads() -> int:
    """How many threads compiled code may use, `>= 1`.

    What `set_num_threads` has chosen; else the environment's `QKV_NUM_THREADS`; else the cores that
    the process may use, by its affinity and the quota of its control group (Linux). A call takes
    fewer when its work does not pay for them.

    Returns
    -------
    int

    Raises
    ------
    ArgumentError
        If nothing was chosen and `QKV_NUM_THREADS` is not a whole number from 1 to 4096.

    Examples
    --------
    >>> import qkv
    >>> qkv.get_num_threads() >= 1
    True
    """
    return default_num_threads() if _num_threads is None else _num_threads


def default_num_threads() -> int:
    """The number when `set_num_threads` has chosen none."""
    text = os.environ.get("QKV_NUM_THREADS", "")
    if not text:
        return usable_cores()
    is_number = text.isascii() and text.isdigit() and len(text) <= _DIGITS
    if not is_number or not 1 <= int(text) <= MAX_THREADS:
        raise ArgumentError(
            f"QKV_NUM_THREADS={shown(text)} is not a number of threads.",
            action=f"Unset it to use every core, or set a whole number from 1 to {MAX_THREADS}.",
        )
    return int(text)


def usable_cores() -> int:
    """Cores that this thread may run on, no more than the control group pays for."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota())))


@lru_cache(maxsize=1)
def _quota() -> float:
    """Processor seconds in a second that the control group may use; read once."""
    return quota_of(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))


def quota_of(membership: Path, root: Path) -> float:
    """The smallest quota of a process' control group and those that it lies in.

    `membership` has a line `hierarchy:controllers:path` for each hierarchy. Version 2 has one
    hierarchy, without controllers, whose groups have a file `cpu.max` ("quota period" or "max
    period"). Version 1 has several; the one with `cpu` lies in a folder of its own and its groups
    have two files. In a container the path may lead nowhere; its own group then is the root.
    """
    smallest = math.inf
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return smallest
    for line in lines:
        _, controllers, path = line.split(":", 2)
        files: tuple[str, ...]
        if controllers == "":
            top, files = root, ("cpu.max",)
        elif "cpu" in controllers.split(","):
            top, files = root / "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            smallest = min(smallest, _folder_quota(folder, files))
            if folder == top:
                break
    return smallest


def _folder_quota(folder: Path, files: tuple[str, ...]) -> float:
    try:
        quota, period = " ".join((folder / name).read_text() for name in files).split()
        limit = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf  # There is no such file, or it says "max".
    return limit if limit > 0 else math.inf  # Version 1 writes -1 for no limit.
