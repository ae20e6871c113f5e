"""Instruction sets, and kernels, that can be forced on this machine."""

from functools import cache

import pytest

from qkv.backends.cpu.machine.host import host
from qkv.errors import ArgumentError


@cache
def instruction_sets() -> tuple[str, ...]:
    """Those that run here, the most able first."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for isa in ("amx", "avx512-bf16", "avx512", "avx2", "sse", "neon"):
            patch.setenv("QKV_ISA", isa)
            try:
                found.append(host().isa)
            except ArgumentError:
                continue
    return tuple(found)


NEEDS_TILES = pytest.mark.skipif(
    "amx" not in instruction_sets(), reason="this processor has no bfloat16 tiles"
)

IN_PARTS = ("float32", "float16")
"""What is multiplied as sums of bfloat16 parts, where that pays."""


def kernels() -> list[str]:
    """`instruction_sets`, and those with products of parts forced where there are any."""
    found = instruction_sets()
    return [*found, *(f"{isa} parts" for isa in found if isa == "amx")]


def takes(kernel: str, dtype: str) -> bool:
    """Whether a kernel is another one than that of the instruction set alone."""
    return dtype in IN_PARTS or not kernel.endswith("parts")
