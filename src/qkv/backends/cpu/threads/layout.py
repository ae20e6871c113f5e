"""What calls must know of the compiled code: words of memory that it shares, and its processor."""

from __future__ import annotations

import platform
from typing import Literal, TypeAlias

Processor: TypeAlias = Literal["x86", "arm", "other"]


def this_processor() -> Processor:
    """The one that this process runs on."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return "x86"
    return "arm" if machine in ("arm64", "aarch64") else "other"


Sleep: TypeAlias = Literal["futex", "condition"]

MOST_WORKERS = 4096

LINE = 128
"""Bytes of two cache lines, which some processors fetch together. Words that change together share
one line."""

_LINES = (
    ("generation", "stopped"),
    ("ticket",),
    ("busy",),
    ("sleeping",),
    ("job", "arguments", "floating"),
    ("spins", "spin_nanoseconds"),
    ("ended", "patience"),
    ("mutex",),
    ("condition",),
)

OFFSET = {
    name: LINE * line + 8 * i for line, names in enumerate(_LINES) for i, name in enumerate(names)
}
"""Where each word lies in the memory that callers and workers share, in bytes; `pool_code` says
what the words are."""

BLOCK_BYTES = LINE * len(_LINES)

FUTEX_NUMBER = {"x86": 202, "arm": 98}
"""The number of the system call futex on Linux."""

LAUNCH_WORDS = ("parallel", "thread_num", "job", "arguments", "threads", "floating")
"""What a launch on the threads of OpenMP is given: addresses of two functions of the library, the
job and its arguments, how many threads may join, and room for the caller's floating mode."""
