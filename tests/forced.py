"""Instruction sets that tests force, real where the machine has them, else emulated."""

from functools import cache

import pytest

from qkv.backends.cpu.machine.host import EMULATED, host
from qkv.errors import ArgumentError
from sampling import sample

OF_X86 = ("amx", "avx512-bf16", "avx512", "avx2", "sse")
OF_ARM = ("neon-bf16", "neon-fhm", "neon")
WITH_BFLOAT16 = ("amx", "avx512-bf16", "neon-bf16")
"""Instruction sets that multiply bfloat16."""


EMULATED_HERE = (*OF_X86, "neon-bf16")
"""Instruction sets that are tested where the machine lacks them."""


@cache
def runs_here(isa: str) -> bool:
    """Whether the machine has an instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKV_ISA", isa)
        try:
            return host().isa == isa
        except ArgumentError:
            return False


def as_it_runs(isa: str) -> str:
    """An instruction set if the machine has it, else its emulation: what `QKV_ISA` is set to."""
    return isa if runs_here(isa) else isa + EMULATED


@cache
def instruction_sets() -> tuple[str, ...]:
    """The most able one of the machine, the others that it has, and those that it emulates."""
    real = [isa for isa in (*OF_X86, *OF_ARM) if runs_here(isa)]
    return (*real, *(isa + EMULATED for isa in EMULATED_HERE if isa not in real))


def both_ways(isa: str) -> list[str]:
    """The emulation of an instruction set, and the set itself where the machine has it."""
    return [isa + EMULATED, *([isa] if runs_here(isa) else [])]


IN_PARTS = ("float32", "float16")
"""What is multiplied as sums of bfloat16 parts, where that pays."""


def kernels() -> list[str]:
    """`instruction_sets`, and tiles with products of parts forced."""
    return [*instruction_sets(), f"{as_it_runs('amx')} parts"]


def sampled_kernels(config: pytest.Config) -> list[str]:
    """The `kernels` that are real, and one in four of the emulated ones, which compile slowly."""
    emulated = [kernel for kernel in kernels() if EMULATED in kernel]
    real = [kernel for kernel in kernels() if kernel not in emulated]
    return [*real, *sample(config, emulated, 4)]


def takes(kernel: str, dtype: str) -> bool:
    """Whether a kernel is another one than that of the instruction set alone."""
    return dtype in IN_PARTS or not kernel.endswith("parts")
