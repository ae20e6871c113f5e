"""Kernels that the library would not choose for small problems, or on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.passes import backward, gradient
from qkv.backends.cpu.plan import schedule
from qkv.backends.cpu.split_bf16 import choice
from qkv.call.repeated.cache import CALLS
from qkv.errors import ArgumentError

__all__ = ["forced"]


@cache
def instruction_sets() -> tuple[str, ...]:
    """The instruction sets of the machine, the most able first, and emulated ones of bfloat16."""
    found = []
    of_bfloat16 = "amx-emulated", "avx512-bf16-emulated"
    for isa in ("amx", "avx512-bf16", "avx512", "avx2", "sse", "neon", *of_bfloat16):
        with patch.dict("os.environ", QKV_ISA=isa):
            try:
                here = host()
            except ArgumentError:
                continue
        if here.kernels not in found:
            found.append(here.isa)
    return tuple(found)


@contextmanager
def forced(wanted: Mapping[str, Any]) -> Iterator[None]:
    """What `Problem.forced` says, without anything that was prepared before or stays prepared."""
    known = instruction_sets()
    with ExitStack() as stack:
        isa = known[wanted.get("isa", 0) % len(known)]
        stack.enter_context(patch.dict("os.environ", QKV_ISA=isa))
        if wanted.get("masks read"):
            stack.enter_context(patch.object(schedule, "CHEAP_OPERATIONS", 0))
        if wanted.get("parts") and isa.startswith("amx"):
            least = dict.fromkeys(choice.LEAST_SIZES, (1, 1))
            stack.enter_context(patch.object(choice, "LEAST_SIZES", least))
            stack.enter_context(patch.object(backward, "_LEAST_QUERIES", 1))
            stack.enter_context(patch.object(gradient, "_MOST_QUERIES", 0))
        CALLS.clear()
        stack.callback(CALLS.clear)
        yield
